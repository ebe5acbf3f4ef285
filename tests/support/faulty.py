"""The smallest tier, and wrappers that make a tier hang, come late, raise or lie. A `Gate` says when.

The scheduler's thread calls a wrapper with `is_nonblocking`, so the wrapped tier must return at once too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.testing.faults import JobWrapperTier
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier

_UNKNOWN_JOB: JobId = 1 << 60
_UNASKED_KEY = make_offload_key(b"not in the job", 0)


class Gate:
    """Open or closed; any thread may use it."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._opened = threading.Event()
        self.waiting = 0
        """How many threads wait at the gate; read only."""
        self._lock = threading.Lock()
        if is_open:
            self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        """Let all threads pass, from now on."""
        self._opened.set()

    def close(self) -> None:
        """Block every thread that arrives from now on."""
        self._opened.clear()

    def pass_through(self) -> None:
        """Return once the gate is open; waits without a limit."""
        if self._opened.is_set():
            return
        with self._lock:
            self.waiting += 1
        try:
            self._opened.wait()
        finally:
            with self._lock:
                self.waiting -= 1


class HangingTier(WrapperTier):
    """The methods named in `calls` hang in their thread while the gate is closed.

    While `raising` is set, every call that may carry data raises OSError.
    """

    raising = False

    def __init__(
        self,
        inner: SecondaryTierManager,
        gate: Gate,
        calls: Collection[str] = ("lookup", "submit_store", "submit_load", "get_finished"),
    ) -> None:
        super().__init__(inner)
        self._gate = gate
        self._calls = frozenset(calls)

    def _before(self, call: str) -> None:
        if call in self._calls:
            self._gate.pass_through()
        if self.raising and call != "shutdown":
            raise OSError("injected")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._before("lookup")
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._before("submit_store")
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._before("submit_load")
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self._before("get_finished")
        return super().get_finished()

    def shutdown(self) -> None:
        self._before("shutdown")
        super().shutdown()


class HeldJobsTier(JobWrapperTier):
    """No job begins while the gate is closed; then all do, even past their deadlines.

    A late load writes into rows whose job has expired long ago. With `hold_lookups` every lookup is answered None, too,
    while the gate is closed.
    """

    def __init__(self, inner: SecondaryTierManager, gate: Gate, *, hold_lookups: bool = False) -> None:
        super().__init__(inner)
        self._gate = gate
        self._hold_lookups = hold_lookups
        self._held: deque[JobMetadata] = deque()
        self._void: set[JobId] = set()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._hold_lookups and not self._gate.is_open:
            return None
        return super().lookup(key, req_context)

    def submit(self, job: JobMetadata) -> None:
        self._held.append(job)

    def get_finished(self) -> Iterable[JobResult]:
        void: list[JobResult] = []
        while self._held and self._gate.is_open:
            job = self._held.popleft()
            if job.job_id in self._void:
                self._void.remove(job.job_id)
                void.append(JobResult(job.job_id, False, reason="reset"))
            else:
                super().submit(job)
        return void + list(super().get_finished())

    def reset_cache(self) -> bool:
        self._void |= {job.job_id for job in self._held if not job.is_promotion}
        return super().reset_cache()


class Lie(Enum):
    """What a `LyingTier` does wrong."""

    HAS_EVERYTHING = "lookup is True for every key"
    STORES_NOTHING = "stores are reported as done, and not done"
    LOADS_NOTHING = "loads are reported as done, and not done"
    FLIPS_BYTES = "a byte of every loaded block is wrong"
    WRITES_ELSEWHERE = "a load also writes into a block outside its job"
    CHANGES_SOURCES = "a store changes the block that it copies"
    REPORTS_TWICE = "each job is reported twice"
    REPORTS_NOTHING = "jobs are done, and never reported"
    REPORTS_UNKNOWN_JOBS = "jobs are reported that were not submitted"
    NAMES_UNASKED_KEYS = "results name keys that were not in the job"


class LyingTier(JobWrapperTier):
    """Tells one lie while `lying` is set."""

    def __init__(self, inner: SecondaryTierManager, lie: Lie) -> None:
        super().__init__(inner)
        shape = inner._primary_kv_view.shape
        assert shape is not None
        self._num_blocks, self._block_bytes = shape
        memory = inner.tier_spec.memory
        self._row_bytes = self._block_bytes if memory is None else 1
        self._region = (inner._primary_kv_view if memory is None else memory).cast("B")
        self._lie = lie
        self._jobs: dict[JobId, JobMetadata] = {}
        self._made_up: list[JobResult] = []
        self.lying = True

    def _tells(self, lie: Lie) -> bool:
        return self.lying and self._lie is lie

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return True if self._tells(Lie.HAS_EVERYTHING) else super().lookup(key, req_context)

    def submit(self, job: JobMetadata) -> None:
        if self._tells(Lie.LOADS_NOTHING if job.is_promotion else Lie.STORES_NOTHING):
            self._made_up.append(JobResult(job.job_id, True))
            return
        self._jobs[job.job_id] = job
        super().submit(job)

    def get_finished(self) -> Iterable[JobResult]:
        results, self._made_up = self._made_up, []
        for result in super().get_finished():
            results += self._falsified(result, self._jobs.pop(result.job_id, None))
        if self._tells(Lie.REPORTS_UNKNOWN_JOBS):
            results.append(JobResult(_UNKNOWN_JOB, True))
        return results

    def _falsified(self, result: JobResult, job: JobMetadata | None) -> list[JobResult]:
        if not self.lying or job is None:
            return [result]
        match self._lie:
            case Lie.REPORTS_TWICE:
                return [result, result]
            case Lie.REPORTS_NOTHING:
                return []
            case Lie.NAMES_UNASKED_KEYS:
                return [JobResult(result.job_id, False, [_UNASKED_KEY, *job.keys])]
            case Lie.FLIPS_BYTES if job.is_promotion:
                self._flip(job.block_ids.tolist())
            case Lie.WRITES_ELSEWHERE if job.is_promotion:
                own = set(job.block_ids.tolist())
                self._flip(next([block] for block in range(self._num_blocks) if block not in own))
            case Lie.CHANGES_SOURCES if not job.is_promotion:
                self._flip(job.block_ids.tolist())
        return [result]

    def _flip(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._region[block_id * self._row_bytes] ^= 0xFF


class FourMethodTier(SecondaryTierManager):
    """Keeps copies of blocks in a dictionary, and executes each job within its submission.

    It has no partial success, deadlines, verification or resets, which are optional for a tier.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        shape = primary_kv_view.shape
        assert shape is not None
        self._block_bytes = shape[1]
        self._region = primary_kv_view.cast("B")
        self._finished: list[JobResult] = []
        self.blocks: dict[OffloadKey, bytes] = {}
        """The stored blocks; tests may read and damage them."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.blocks

    def submit_store(self, job_metadata: JobMetadata) -> None:
        for key, row in self._rows(job_metadata):
            if key not in self.blocks:
                self.blocks[key] = bytes(row)
        self._finished.append(JobResult(job_metadata.job_id, True))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        success = all(key in self.blocks for key in job_metadata.keys)
        if success:
            for key, row in self._rows(job_metadata):
                row[:] = self.blocks[key]
        self._finished.append(JobResult(job_metadata.job_id, success))

    def get_finished(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    def _rows(self, job: JobMetadata) -> Iterable[tuple[OffloadKey, memoryview]]:
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            yield key, self._region[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]
