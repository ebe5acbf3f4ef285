"""Wrappers of a tier: one fails jobs while a test wants it, one makes the order of ended jobs repeatable.

    tier = FailingTier(MemoryTier(spec, view, "memory"))
    tier.failing = True

The scheduler's thread calls a wrapper with `is_nonblocking`, so the wrapped tier must return at once too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import ClassVar

from tiered_kv.base import OffloadKey
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier

_POLL_S = 0.0002
_WAIT_S_MAX = 20.0


class JobWrapperTier(WrapperTier):
    """The base of wrappers that change what happens to jobs; it treats stores and loads alike."""

    is_nonblocking: ClassVar[bool] = True

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.submit(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.submit(job_metadata)

    def submit(self, job: JobMetadata) -> None:
        """Submit a store or a load to the wrapped tier; override it."""
        (self.inner.submit_load if job.is_promotion else self.inner.submit_store)(job)


class FailingTier(JobWrapperTier):
    """While `failing` is set, leaves keys for which `fails` is true out of each job, and reports them as failed.

    By default these are all keys. Lookups are not changed.
    """

    def __init__(
        self,
        inner: SecondaryTierManager,
        *,
        failing: bool = False,
        fails: Callable[[OffloadKey], bool] = lambda key: True,
    ) -> None:
        super().__init__(inner)
        self.failing = failing
        self._fails = fails
        self._failed: list[JobId] = []
        self._kept: dict[JobId, list[OffloadKey]] = {}
        """The keys that went to the wrapped tier, by job."""

    def submit(self, job: JobMetadata) -> None:
        kept = [index for index, key in enumerate(job.keys) if not (self.failing and self._fails(key))]
        if self.failing and not kept:
            self._failed.append(job.job_id)
            return
        if len(kept) < len(job.keys):
            keys = list(job.keys)
            self._kept[job.job_id] = [keys[index] for index in kept]
            job = replace(job, keys=self._kept[job.job_id], block_ids=job.block_ids[kept])
        super().submit(job)

    def get_finished(self) -> Iterable[JobResult]:
        failed, self._failed = self._failed, []
        return [JobResult(job_id, False, reason="injected") for job_id in failed] + [
            self._partial(result) for result in super().get_finished()
        ]

    def _partial(self, result: JobResult) -> JobResult:
        kept = self._kept.pop(result.job_id, None)
        if kept is None:
            return result
        succeeded = kept if result.success else list(result.successful_keys or ())
        return JobResult(result.job_id, False, succeeded, reason="injected")


class PromptTier(JobWrapperTier):
    """Waits in `get_finished` until every submitted job has ended, at most 20 s.

    So the end of a job depends on the order of calls, not on threads. A random test that failed fails again.
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
