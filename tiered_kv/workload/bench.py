"""Measures throughput and lookup latency of one secondary tier, without a manager.

A round stores new blocks, looks them up, clears the region and loads them back. All jobs of a direction are submitted
at once, and every loaded byte is checked. The blocks have random keys and stay in the tier until it evicts them. The
commands `bench` and `check` call it, on one thread, which acts as the scheduler.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.errors import TierUnavailableError
from tiered_kv.tiering.base import JobMetadata, SecondaryTierManager
from tiered_kv.workload.content import BlockContent
from tiered_kv.workload.tally import GB, NO_LATENCY, LatencyUs

POLL_S = 0.0002
"""Time between two polls for finished jobs and lookups."""
_GIVE_UP_S = 10.0
"""If no job has stored a block after this time, and one has failed, stores end: the tier's server may be away."""
_LOOKUPS_MAX = 2000  # measured in a round, about
_KEY_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """New blocks in a round, blocks in a job, rounds, and the time limit of a lookup or a direction of a round."""

    blocks: int
    batch: int = 32
    rounds: int = 3
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """Throughput of one round in 1e9 bytes per second, of the blocks that succeeded, and the busy CPU cores."""

    store_gb_per_s: float
    load_gb_per_s: float
    store_cores: float
    load_cores: float


@dataclass(slots=True)
class TierBench:
    """The result for one tier; `docs/reference/command.md` describes each field."""

    name: str
    type: str
    block_bytes: int
    batch: int
    blocks: int
    store_gb_per_s: float = 0.0
    load_gb_per_s: float = 0.0
    lookup_us: LatencyUs = NO_LATENCY
    rounds: list[Round] = field(default_factory=list)
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    error: str = ""
    left: str = ""

    @property
    def ok(self) -> bool:
        """Whether blocks were loaded, and all with the right bytes."""
        return self.is_measured and not self.error and not self.corrupt_blocks

    @property
    def is_measured(self) -> bool:
        """Whether blocks were loaded, so that there are rates and times."""
        return self.verified_blocks + self.corrupt_blocks > 0


def bench_tier(
    tier: SecondaryTierManager,
    name: str,
    kv_view: memoryview,
    settings: BenchSettings,
    *,
    on_round: Callable[[int], None] = lambda rounds: None,
) -> TierBench:
    """Measure a tier that is open over `kv_view` and has no other user.

    `kv_view` has a row for each block of a round, and is overwritten. `on_round` gets the number of rounds so far.

    Raises:
        TierUnavailableError: A transfer or lookup timed out. A transfer may still access `kv_view`.
    """
    bench = _Bench(tier, name, kv_view, settings)
    for number in range(settings.rounds):
        bench.run_round(number)
        on_round(number + 1)
        if not bench.result.is_measured:  # another round would wait for the same server
            break
    result = bench.result
    result.store_gb_per_s = median(each.store_gb_per_s for each in result.rounds)
    result.load_gb_per_s = median(each.load_gb_per_s for each in result.rounds)
    result.lookup_us = LatencyUs.of_seconds(bench.lookup_s)
    return result


class _Bench:
    """The state of a measurement; used by one thread."""

    def __init__(self, tier: SecondaryTierManager, name: str, kv_view: memoryview, settings: BenchSettings) -> None:
        self._tier = tier
        self._settings = settings
        self._rows = np.asarray(kv_view)
        self._content = BlockContent(self._rows.shape[1])
        self._job_ids = count()
        self._token = os.urandom(8)
        self.lookup_s: list[float] = []
        self.result = TierBench(name, tier.tier_type, self._rows.shape[1], settings.batch, settings.blocks)

    def run_round(self, number: int) -> None:
        blocks = self._settings.blocks
        first_id = int.from_bytes(self._token, "little") ^ (number * blocks)
        ids = [(first_id + i) % 2**64 for i in range(blocks)]
        keys = [self._key(number, i) for i in range(blocks)]
        context = ReqContext(req_id=f"bench-{self._token.hex()}-{number}")
        self._tier.on_new_request(context)
        self._content.fill(self._rows, range(blocks), ids)
        stored, store_s, store_cores = self._transfer(
            self._tier.submit_store, keys, range(blocks), context, is_load=False
        )
        self.result.failed_stores += blocks - len(stored)
        self._measure_lookups([keys[row] for row in stored[:: max(1, len(stored) // _LOOKUPS_MAX)]], context)
        # Bytes that the store left in the region must not count as loaded.
        self._rows[:blocks] = 0
        loaded, load_s, load_cores = self._transfer(
            self._tier.submit_load, [keys[row] for row in stored], stored, context, is_load=True
        )
        self.result.failed_loads += len(stored) - len(loaded)
        wrong = self._content.check(self._rows, loaded, [ids[row] for row in loaded])
        self.result.corrupt_blocks += len(wrong)
        self.result.verified_blocks += len(loaded) - len(wrong)
        self._tier.on_request_finished(context)
        rates = self._rate(stored, store_s), self._rate(loaded, load_s)
        self.result.rounds.append(Round(*rates, store_cores, load_cores))

    def _key(self, number: int, index: int) -> OffloadKey:
        place = number.to_bytes(8, "little") + index.to_bytes(8, "little")
        digest = hashlib.blake2b(place, digest_size=_KEY_HASH_BYTES, key=self._token, person=b"tiered-kv bench")
        return make_offload_key(digest.digest(), 0)

    def _transfer(
        self,
        submit: Callable[[JobMetadata], None],
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        context: ReqContext,
        *,
        is_load: bool,
    ) -> tuple[list[int], float, float]:
        """Submit all blocks as jobs and wait; return the rows that succeeded, the seconds, and the cores in use."""
        deadline_s = time.monotonic() + self._settings.timeout_s
        jobs = []
        for first in range(0, len(keys), self._settings.batch):
            chunk = slice(first, first + self._settings.batch)
            block_ids = np.array(rows[chunk], dtype=np.int64)
            jobs.append(JobMetadata(next(self._job_ids), keys[chunk], block_ids, is_load, context, deadline_s))
        succeeded: list[int] = []
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for job in jobs:
            submit(job)
        self._tier.on_schedule_end()
        pending = {job.job_id: job for job in jobs}
        while pending:
            for result in self._tier.get_finished():
                job = pending.pop(result.job_id)
                if result.success:
                    succeeded += job.block_ids.tolist()
                    continue
                reason = result.reason or "unknown"
                self.result.reasons[reason] = self.result.reasons.get(reason, 0) + 1
                good = set(result.successful_keys or ())
                succeeded += [int(row) for key, row in zip(job.keys, job.block_ids, strict=True) if key in good]
            is_away = not is_load and not succeeded and 0 < len(pending) < len(jobs)
            if is_away and time.perf_counter() - started_s > _GIVE_UP_S:
                raise self._unavailable("no store job succeeded", "store")
            if pending:
                operation = "load" if is_load else "store"
                self._wait_until(
                    deadline_s, operation, f"{len(pending)} {operation} {'job' if len(pending) == 1 else 'jobs'}"
                )
        seconds = time.perf_counter() - started_s
        return succeeded, seconds, round((time.process_time() - started_cpu_s) / seconds, 2)

    def _measure_lookups(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        for key in keys:
            deadline_s = time.monotonic() + self._settings.timeout_s
            started_s = time.perf_counter()
            while self._tier.lookup(key, context) is None:
                self._tier.on_schedule_end()
                self._wait_until(deadline_s, "lookup", "the lookup of a key")
            self.lookup_s.append(time.perf_counter() - started_s)

    def _wait_until(self, deadline_s: float, operation: str, what: str) -> None:
        if time.monotonic() > deadline_s:
            raise self._unavailable(f"{what} did not end in {self._settings.timeout_s:g} s", operation)
        time.sleep(POLL_S)

    def _unavailable(self, problem: str, operation: str) -> TierUnavailableError:
        failed = ", ".join(f"{count} {reason}" for reason, count in self.result.reasons.items())
        problem += failed and f"; jobs failed before: {failed}"
        return TierUnavailableError(problem, tier=self.result.name, operation=operation)

    def _rate(self, blocks: Sequence[int], seconds: float) -> float:
        return round(len(blocks) * self._content.block_bytes / GB / seconds, 3)
