"""Shared by the measuring scripts: blocks in a region, jobs over them, a tier without storage, medians, tables."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.base import OffloadingManager, OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager

_POLL_S = 0.0002
_NUMBERS = itertools.count()

Sample = Mapping[str, float]
"""What one side did in one round: rates and costs by name."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The seconds that some work took: by the clock, and of this process's CPUs."""

    wall_s: float
    cpu_s: float


class BlockRows:
    """A region whose rows hold distinct blocks; block n belongs in row n modulo the number of rows."""

    def __init__(self, block_bytes: int, rows: int) -> None:
        self.block_bytes, self.rows = block_bytes, rows
        self.region = PrimaryRegion(rows, block_bytes, prefault=True)
        self._pattern = _bfloat16(block_bytes)
        self.region.array[:] = self._pattern
        self.region.array[:, :8] = np.arange(rows, dtype="<u8").view(np.uint8).reshape(rows, 8)
        self._job_ids = itertools.count()

    def store(self, tier: SecondaryTierManager, first: int, count: int, batch: int) -> Taken:
        """Store blocks `first` to `first + count` in jobs of `batch`, at most as many at a time as there are rows."""
        return self._all(tier, first, count, batch, is_promotion=False)

    def load(self, tier: SecondaryTierManager, first: int, count: int, batch: int) -> Taken:
        """Load blocks into their rows, which are cleared before and compared afterwards."""
        return self._all(tier, first, count, batch, is_promotion=True)

    def _all(self, tier: SecondaryTierManager, first: int, count: int, batch: int, *, is_promotion: bool) -> Taken:
        taken = []
        for begin in range(first, first + count, self.rows):
            part = min(self.rows, first + count - begin)
            rows = np.arange(begin, begin + part) % self.rows
            if is_promotion:
                self.region.array[rows] = 0
            taken.append(self._run(tier, begin, part, batch, is_promotion=is_promotion))
            if is_promotion:
                self.compare(rows)
        return Taken(sum(each.wall_s for each in taken), sum(each.cpu_s for each in taken))

    def compare(self, rows: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Raise `AssertionError` unless each of `rows` holds its block."""
        for row in rows:
            found = self.region.array[row]
            if int(found[:8].view("<u8")[0]) != row or not np.array_equal(found[8:], self._pattern[8:]):
                raise AssertionError("wrong bytes")

    def _run(self, tier: SecondaryTierManager, first: int, count: int, batch: int, *, is_promotion: bool) -> Taken:
        """Submit all jobs at once, then poll, as the tiering manager does."""
        submit, context = tier.submit_load if is_promotion else tier.submit_store, ReqContext("rates")
        all_keys = [block_key(number) for number in range(first, first + count)]

        def work() -> None:
            pending = set()
            for begin in range(0, count, batch):
                keys = all_keys[begin : begin + batch]
                rows = np.arange(first + begin, first + begin + len(keys), dtype=np.int64) % self.rows
                job = JobMetadata(next(self._job_ids), keys, rows, is_promotion, context)
                pending.add(job.job_id)
                submit(job)
            while pending:
                for result in tier.get_finished():
                    if not result.success:
                        raise AssertionError(f"a job failed: {result.reason}")
                    pending.discard(result.job_id)
                time.sleep(_POLL_S)

        return timed(work)


def _bfloat16(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return values of 128 channels with scales of their own: codecs compress them as they do keys and values."""
    rng = np.random.default_rng(0)
    scales = rng.lognormal(size=128).astype(np.float32)
    values = rng.standard_normal((-(-size_bytes // 256), 128), dtype=np.float32) * scales
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    return np.frombuffer(upper.tobytes(), dtype=np.uint8)[:size_bytes]


Act = Callable[[OffloadingManager, list[OffloadKey], ReqContext], object]
"""A part of what a scheduler does for a request."""


def handle(manager: OffloadingManager, keys: list[OffloadKey], acts: Iterable[Act]) -> None:
    """Handle one request in one step, as a scheduler does."""
    context = ReqContext(f"request-{next(_NUMBERS)}")
    manager.on_new_request(context)
    for act in acts:
        act(manager, keys, context)
    manager.on_request_finished(context)
    manager.on_schedule_end()


def store(manager: OffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)


def load(manager: OffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)


class InstantTier(SecondaryTierManager):
    """Remembers keys, moves nothing, and ends every job at once."""

    is_nonblocking = True

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "instant")
        self._keys: set[OffloadKey] = set()
        self._finished: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self._keys

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._keys.update(job_metadata.keys)
        self._finished.append(JobResult(job_metadata.job_id, True))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, True))

    def get_finished(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished


def command_line(doc: str | None, *paths: str, **options: Any) -> argparse.ArgumentParser:
    """Return a script's parser.

    Args:
        doc: The script's description.
        paths: Names of positional paths.
        options: Names of options, and their defaults; a type in place of a default: None, and values of that type.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for path in paths:
        parser.add_argument(path, type=Path)
    for name, given in options.items():
        kind, default = (given, None) if isinstance(given, type) else (type(given), given)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    return parser


def block_key(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def timed(work: Callable[[], object]) -> Taken:
    cpu_s, begin = time.process_time(), time.perf_counter()
    work()
    return Taken(time.perf_counter() - begin, time.process_time() - cpu_s)


def sample(gigabytes: float, store: Taken, load: Taken) -> Sample:
    """Return the rates and CPU costs of a store and a load of so many 1e9 bytes."""
    return {
        "store_gb_per_s": gigabytes / store.wall_s,
        "load_gb_per_s": gigabytes / load.wall_s,
        "store_cpu_s_per_gb": store.cpu_s / gigabytes,
        "load_cpu_s_per_gb": load.cpu_s / gigabytes,
    }


def summary(samples: Mapping[str, Sequence[Sample]], pairs: Sequence[tuple[str, str]]) -> dict[str, object]:
    """Return medians of each side's samples, one a round, and the spread of the ratios of pairs of sides.

    Names and pairs whose second side has no samples are left out.
    """
    result: dict[str, object] = {}
    for side, taken in samples.items():
        for name in taken[0]:
            result[f"{side}_{name}"] = round(statistics.median(each[name] for each in taken), 3)
    for ours, theirs in pairs:
        for name in (each for each in samples[ours][0] if each in samples.get(theirs, [{}])[0]):
            mine, others = ([sample[name] for sample in samples[side]] for side in (ours, theirs))
            result[f"{ours}_{name}_over_{theirs}"] = spread(ratios(mine, others))
    return result


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio within each round."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def print_sides(units: Mapping[str, str], samples: Sequence[Sequence[Mapping[str, float]]]) -> None:
    """Print a line for each measure: medians of one or two sides, their ratio, and the spread of the last side.

    Args:
        units: What stands in a line, by the name of its measure.
        samples: By side, what each round measured.
    """
    for name, label in units.items():
        of_sides = [[sample[name] for sample in side] for side in samples]
        medians = [statistics.median(values) for values in of_sides]
        ratio = f"   {medians[1] / medians[0]:.3f} x" if len(medians) > 1 else ""
        spread = f"{min(of_sides[-1]):.4g} to {max(of_sides[-1]):.4g}"
        print(f"  {label:45} {'   '.join(f'{value:10.4g}' for value in medians)}{ratio}   ({spread})", flush=True)


def in_turn(number: int, sides: Iterable[str]) -> list[str]:
    """Return the sides of a round: in their order, and in every second round reversed."""
    return list(sides)[:: -1 if number % 2 else 1]


def row(*columns: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(columns)} |"


def heading(*columns: str) -> str:
    """Return the first two lines of a Markdown table."""
    return f"{row(*columns)}\n{row(*['---'] * len(columns))}"


class Table:
    """Rows that compare this project with others, with a value of each side for each round."""

    def __init__(self) -> None:
        self._rounds: defaultdict[tuple[str, str, str], list[tuple[float, float | None]]] = defaultdict(list)

    def add(self, what: str, ours: float, whom: str = "", theirs: float | None = None, target: str = "") -> None:
        """Add the values of a round."""
        self._rounds[what, whom, target].append((ours, theirs))

    def __str__(self) -> str:
        """Return the table as Markdown."""
        lines = [heading("what", "ours", "compared with", "theirs", "ratio", "target")]
        for (what, whom, target), rounds in self._rounds.items():
            ours = [mine for mine, _ in rounds]
            theirs = [other for _, other in rounds if other is not None]
            compared = ratios(ours, theirs) if theirs else []
            lines.append(row(what, shown(ours), whom, shown(theirs), shown(compared), target))
        return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    """Return the median of values with the least and the greatest, for a table; nothing of none."""
    if not values:
        return ""
    of_all = statistics.median(values), min(values), max(values)
    middle, low, high = (f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in of_all)
    return f"{middle} ({low} to {high})"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of values, the least and the greatest."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}
