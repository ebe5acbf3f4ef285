"""A wrapper that makes a tier with threads behave the same way each time."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier

_POLL_S = 0.0002


class PromptTier(WrapperTier):
    """Waits in `get_finished` until every job that it was given has ended.

    So when a job ends depends on the order of calls and not on threads, and a random test that failed fails again.
    For tests only: a manager's tier must never wait.

    Args:
        inner: The wrapped tier.
        wait_s: How long jobs may take.
    """

    is_nonblocking = True

    def __init__(self, inner: SecondaryTierManager, wait_s: float = 20.0) -> None:
        super().__init__(inner)
        self._wait_s = wait_s
        self._unfinished: set[JobId] = set()

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._unfinished.add(job_metadata.job_id)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._unfinished.add(job_metadata.job_id)
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        end = time.monotonic() + self._wait_s
        while True:
            results += super().get_finished()
            self._unfinished.difference_update(result.job_id for result in results)
            if not self._unfinished or time.monotonic() >= end:
                return results
            time.sleep(_POLL_S)
