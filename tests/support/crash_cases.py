"""Cases of crashes and failing disks: sampled, run by parallel `crash_server` processes, and counted.

with CrashCases(folder) as cases:
    calls = cases.record(scenario, "changes")
    outcomes = cases.run([Case(scenario, Fault.kill(call)) for call in calls])
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar

import pytest

from tests.support import crash_server
from tests.support.children import Child
from tests.support.crash_scenario import CrashScenario
from tests.support.crash_server import Case
from tests.support.figures import Figures
from tests.support.mounts import command_in_namespace, missing_for_ext4
from tests.support.syscalls import Call, missing_for_tracing

T = TypeVar("T")

SEED: Final = 20
"""Of the samples."""
NVME: Final = CrashScenario(
    {"type": "nvme", "path": "kv", "capacity": 424 << 10, "segment": 64 << 10, "threads": 1},
    tenant="crash",
    jobs=14,
    # Five segments of 64 KiB and the small files: the capacity has reserves for what file systems add.
    occupied_bytes_max=384 << 10,
)
FS: Final = CrashScenario(
    {"type": "fs", "path": "kv", "capacity": 768 << 10, "threads": 2},
    tenant="crash",
    jobs=14,
    occupied_bytes_max=768 << 10,
)
NO_BLOCKS: Final = "the cases found hardly any blocks: they prove nothing"

_SERVERS: Final = 6
"""Half of a case is waiting: for threads, for strace, for what a thread was promised."""
_TRIES: Final = 3
"""Threads run in another order each time, so a call of the recorded run may not come in the next. A run without its
fault proves nothing and is repeated; a run with its fault is not, whatever its result."""
_HIT_SHARE_MIN: Final = 0.4
"""The share of cases whose fault must have happened in the end; the others are not counted. Some calls come only where
every thread is traced, or where threads meet in a certain order. Seen were nine tenths and more as a rule, and a third
of a small sample on a busy machine: of less than `_SMALL_SAMPLE` cases, one is enough."""
_SMALL_SAMPLE: Final = 6


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    case: Case
    was_hit: bool  # the fault happened; otherwise the case is not counted
    loaded: int  # blocks, compared byte by byte
    answered: int  # blocks that a lookup found
    problems: Sequence[str]


class CrashCases:
    """Servers that run cases in parallel; the test skips if they cannot."""

    def __init__(self, folder: Path, *, image: bool = False, main: Callable[[], None] = crash_server.main) -> None:
        if missing := missing_for_tracing() or (missing_for_ext4() if image else ""):
            pytest.skip(missing)
        self._servers = [_Server(folder / str(number), image, main) for number in range(_SERVERS)]
        self._free: SimpleQueue[_Server] = SimpleQueue()
        for server in self._servers:
            self._free.put(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:
            for server in self._servers:
                ending.callback(server.end)

    def record(self, scenario: CrashScenario, kind: str, *, kills: bool = True) -> list[Call]:
        return [Call(**call) for call in self._ask(Case(scenario), do="record", kind=kind, kills=kills)]

    def count_writes(self, scenario: CrashScenario) -> int:
        count: int = self._ask(Case(scenario), do="count")
        return count

    def run(self, cases: Sequence[Case]) -> list[CaseOutcome]:
        """Run cases, each until its fault has happened."""
        with ThreadPoolExecutor(len(self._servers)) as threads:
            return list(threads.map(self._run_one, cases))

    def _run_one(self, case: Case) -> CaseOutcome:
        for number in range(_TRIES):
            if number:  # in a new namespace: a server may still have blocks of the run before
                scenario = dataclasses.replace(case.scenario, tenant=f"{case.scenario.tenant}-again")
                case = dataclasses.replace(case, scenario=scenario)
            try:
                outcome = CaseOutcome(case, **self._ask(case, do="case"))
            except RuntimeError as error:
                outcome = CaseOutcome(case, True, 0, 0, [f"the case could not be run: {error}"])
            if outcome.was_hit or outcome.problems:
                break
        return outcome

    def _ask(self, case: Case, **request: object) -> Any:  # Any: JSON
        server = self._free.get()
        try:
            answer = server.ask(case, request)
        finally:
            self._free.put(server)
        if isinstance(answer, dict) and "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer


class _Server:
    def __init__(self, folder: Path, image: bool, main: Callable[[], None]) -> None:
        folder.mkdir(parents=True)
        self._root = folder / "mounted" if image else folder
        within = command_in_namespace if image else list
        self.process = Child(main, str(folder), *(["--image"] * image), within=within)

    def end(self) -> None:
        with self.process, suppress(subprocess.TimeoutExpired):
            self.process.finish(30.0)

    def ask(self, case: Case, request: Mapping[str, object]) -> Any:  # Any: JSON
        """Send a request about a case, whose directory is moved to this server's folder."""
        moved = dataclasses.asdict(case)
        if case.scenario.path is not None:
            moved["scenario"]["entry"]["path"] = str(self._root / case.scenario.path.name)
        self.process.tell(json.dumps({**request, "case": moved}))
        line = self.process.line()
        assert line, f"the crash server ended during {request} of {case}"
        return json.loads(line)


def sample(items: Sequence[T], most: int, kind: Callable[[T], object] = lambda item: 0) -> list[T]:
    """Return at most `most` items, in order; one of each kind if there are more kinds."""
    if len(items) <= most:
        return list(items)
    chance = random.Random(SEED)
    by_kind: dict[object, list[int]] = {}
    for index, item in enumerate(items):
        by_kind.setdefault(kind(item), []).append(index)
    chosen = {chance.choice(indexes) for indexes in by_kind.values()}
    rest = [index for index in range(len(items)) if index not in chosen]
    missing = most - len(chosen)
    if missing > 0:
        # Evenly over the run, so that its beginning, middle and end are all there.
        chosen.update(rest[(2 * number + 1) * len(rest) // (2 * missing)] for number in range(missing))
    return [items[index] for index in sorted(chosen)]


def changes_of(cases: CrashCases, scenario: CrashScenario) -> list[Call]:
    """Return the calls of a run that change the disk, or its locks."""
    return [call for call in cases.record(scenario, "changes") if call.name != "openat" or call.makes_file]


def settle(proof: str, outcomes: Iterable[CaseOutcome], figures: Figures, note: str = "") -> list[CaseOutcome]:
    """Count the cases whose fault happened, and fail if any broke a promise."""
    every = list(outcomes)
    hit = [outcome for outcome in every if outcome.was_hit or outcome.problems]
    broken = [outcome for outcome in hit if outcome.problems]
    missed = f"faults not made: {len(every) - len(hit)}" if len(hit) < len(every) else ""
    figures.add(proof, tried=len(hit), passed=len(hit) - len(broken), note=", ".join(filter(None, (note, missed))))
    text = "\n".join(f"{outcome.case}: {'; '.join(outcome.problems)}" for outcome in broken[:10])
    assert not broken, f"{len(broken)} of {len(hit)} cases of {proof} broke a promise:\n{text}"
    least = 1 if len(every) < _SMALL_SAMPLE else _HIT_SHARE_MIN * len(every)
    assert len(hit) >= least, f"only {len(hit)} of {len(every)} faults happened"
    return hit
