"""A tier on a disk of a known rate, in the time of `time.monotonic`, which may be a program's own clock."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager

_END_S = 1e-9


class PacedTier(SecondaryTierManager):
    """Knows which blocks it has, and moves no bytes.

    Its disk serves loads and stores each in their order, and each kind gets half of the rate while both wait. A block
    that the disk has is not stored again.
    """

    is_nonblocking = True

    def __init__(self, spec: Any, view: memoryview, tier_type: str, *, bytes_per_s: float) -> None:
        super().__init__(spec, view, tier_type)
        assert view.strides is not None
        self._block_s = view.strides[0] / bytes_per_s
        self._keys: set[OffloadKey] = set()
        self._stores: deque[tuple[float, JobMetadata]] = deque()
        self._loads: deque[tuple[float, JobMetadata]] = deque()
        self._results: list[JobResult] = []
        self._now_s = time.monotonic()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return key in self._keys

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._advance()
        new = sum(key not in self._keys for key in job_metadata.keys)
        self._stores.append((new * self._block_s, job_metadata))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._advance()
        self._loads.append((len(job_metadata.keys) * self._block_s, job_metadata))

    def get_finished(self) -> list[JobResult]:
        self._advance()
        results, self._results = self._results, []
        return results

    def _advance(self) -> None:
        """Let the disk work until now."""
        now_s = time.monotonic()
        while queues := [queue for queue in (self._stores, self._loads) if queue]:
            work_s = min((now_s - self._now_s) / len(queues), *(queue[0][0] for queue in queues))
            self._now_s += work_s * len(queues)
            for queue in queues:
                left_s, job = queue.popleft()
                if left_s - work_s > _END_S:
                    queue.appendleft((left_s - work_s, job))
                    continue
                if not job.is_promotion:
                    self._keys.update(job.keys)
                self._results.append(JobResult(job.job_id, True, ended_s=self._now_s))
            if now_s - self._now_s <= _END_S:
                break
        self._now_s = now_s
