"""A wrapper that makes a tier with threads repeatable."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tiered_kv.testing.faults import JobWrapperTier
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager

_POLL_S = 0.0002
_WAIT_S_MAX = 20.0


class PromptTier(JobWrapperTier):
    """Waits in `get_finished` until every submitted job has ended, at most 20 s.

    So the end of a job depends on the order of calls and not on threads, and a random test that failed fails again.
    """

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner)
        self._unfinished: set[JobId] = set()

    def submit(self, job: JobMetadata) -> None:
        self._unfinished.add(job.job_id)
        super().submit(job)

    def get_finished(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        end = time.monotonic() + _WAIT_S_MAX
        while True:
            results += super().get_finished()
            self._unfinished.difference_update(result.job_id for result in results)
            if not self._unfinished or time.monotonic() >= end:
                return results
            time.sleep(_POLL_S)
