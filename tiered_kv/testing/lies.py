"""A wrapper that gives wrong answers."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.testing.faults import JobWrapperTier
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager

_UNKNOWN_JOB: JobId = 1 << 60
_UNASKED_KEY = make_offload_key(b"not in the job", 0)


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
        memory = getattr(inner._offloading_spec, "memory", None)
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
