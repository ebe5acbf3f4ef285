"""Wrappers that make a good tier misbehave.

    tier = FailingTier(MemoryTier(spec, view, "memory"))
    tier.failing = True

No wrapper waits for a time or chooses at random. The test decides what fails, and until when, through an
attribute, a `Gate` or a `ManualClock`.

A wrapper that says `is_nonblocking` is called on the scheduler's thread, so the wrapped tier must return at once
too. `HangingTier` and `RaisingTier` do not say so, and the manager gives them a thread of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import ClassVar

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.testing.gate import Gate
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier


class HangingTier(WrapperTier):
    """Calls hang in their thread while the gate is closed, as with a lost mount or a client without timeouts.

    Args:
        inner: The wrapped tier.
        gate: Calls hang while it is closed.
        calls: Names of the methods that hang.
    """

    def __init__(
        self,
        inner: SecondaryTierManager,
        gate: Gate,
        calls: Collection[str] = ("lookup", "submit_store", "submit_load", "get_finished"),
    ) -> None:
        super().__init__(inner)
        self._gate = gate
        self._calls = frozenset(calls)

    def _hang(self, call: str) -> None:
        if call in self._calls:
            self._gate.pass_through()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._hang("lookup")
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._hang("submit_store")
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._hang("submit_load")
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self._hang("get_finished")
        return super().get_finished()

    def shutdown(self) -> None:
        self._hang("shutdown")
        super().shutdown()


class LateTier(WrapperTier):
    """Calls return at once, but each job begins late; the base of the two below.

    A late load is the dangerous case: it writes into blocks of a job that expired long ago.
    """

    is_nonblocking: ClassVar[bool] = True

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner)
        self._late: deque[tuple[float, JobMetadata]] = deque()
        self._void: set[JobId] = set()

    def _due_s(self) -> float:
        """Return when a job that is submitted now may begin; unused where `_may_begin` does not look at it."""
        return 0.0

    def _may_begin(self, due_s: float) -> bool:
        raise NotImplementedError

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._late.append((self._due_s(), job_metadata))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._late.append((self._due_s(), job_metadata))

    def get_finished(self) -> Iterable[JobResult]:
        void: list[JobResult] = []
        while self._late and self._may_begin(self._late[0][0]):
            _, job = self._late.popleft()
            if job.job_id in self._void:
                self._void.remove(job.job_id)
                void.append(JobResult(job.job_id, False, reason="reset"))
            elif job.is_promotion:
                self.inner.submit_load(job)
            else:
                self.inner.submit_store(job)
        return void + list(super().get_finished())

    def reset_cache(self) -> bool:
        self._void |= {job.job_id for _, job in self._late if not job.is_promotion}
        return super().reset_cache()


class HeldJobsTier(LateTier):
    """No job begins while the gate is closed. When it opens, all begin, however late that is.

    Args:
        inner: The wrapped tier.
        gate: Jobs are held while it is closed.
        hold_lookups: Also answer every lookup with None while it is closed.
    """

    def __init__(self, inner: SecondaryTierManager, gate: Gate, *, hold_lookups: bool = False) -> None:
        super().__init__(inner)
        self._gate = gate
        self._hold_lookups = hold_lookups

    def _may_begin(self, due_s: float) -> bool:
        return self._gate.is_open

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._hold_lookups and not self._gate.is_open:
            return None
        return super().lookup(key, req_context)


class SlowTier(LateTier):
    """Begins every job, and answers every lookup, `delay_s` late by a clock that the test moves.

    Args:
        inner: The wrapped tier.
        clock: Seconds, such as a `ManualClock`.
        delay_s: The delay; a test may change it for later calls.
    """

    def __init__(self, inner: SecondaryTierManager, clock: Callable[[], float], delay_s: float) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self._clock = clock
        self._asked_at_s: dict[tuple[str, OffloadKey], float] = {}

    def _due_s(self) -> float:
        return self._clock() + self.delay_s

    def _may_begin(self, due_s: float) -> bool:
        return self._clock() >= due_s

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        now = self._clock()
        asked_at_s = self._asked_at_s.setdefault((req_context.req_id, key), now)
        return None if now < asked_at_s + self.delay_s else super().lookup(key, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        for asked in [asked for asked in self._asked_at_s if asked[0] == req_context.req_id]:
            del self._asked_at_s[asked]
        super().on_request_finished(req_context)


class FailingTier(WrapperTier):
    """Reports every job as failed, without executing it, while `failing` is set. Lookups work as before."""

    is_nonblocking: ClassVar[bool] = True

    def __init__(self, inner: SecondaryTierManager, *, failing: bool = False) -> None:
        super().__init__(inner)
        self.failing = failing
        self._failed: list[JobId] = []

    def submit_store(self, job_metadata: JobMetadata) -> None:
        if self.failing:
            self._failed.append(job_metadata.job_id)
        else:
            super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        if self.failing:
            self._failed.append(job_metadata.job_id)
        else:
            super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        failed, self._failed = self._failed, []
        return [JobResult(job_id, False, reason="injected") for job_id in failed] + list(super().get_finished())


class RaisingTier(WrapperTier):
    """Every call that may carry data raises OSError while `raising` is set."""

    def __init__(self, inner: SecondaryTierManager, *, raising: bool = False) -> None:
        super().__init__(inner)
        self.raising = raising

    def _raise(self) -> None:
        if self.raising:
            raise OSError("injected")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._raise()
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._raise()
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._raise()
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self._raise()
        return super().get_finished()


class PartialTier(WrapperTier):
    """Only some keys succeed. The others are removed from each job, and reported as failed.

    Args:
        inner: The wrapped tier.
        succeeds: Whether a key may succeed.
    """

    is_nonblocking: ClassVar[bool] = True

    def __init__(self, inner: SecondaryTierManager, succeeds: Callable[[OffloadKey], bool]) -> None:
        super().__init__(inner)
        self._succeeds = succeeds
        self._kept: dict[JobId, list[OffloadKey]] = {}

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.inner.submit_store(self._part(job_metadata))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.inner.submit_load(self._part(job_metadata))

    def _part(self, job: JobMetadata) -> JobMetadata:
        kept = [index for index, key in enumerate(job.keys) if self._succeeds(key)]
        if len(kept) == len(job.keys):
            return job
        keys = list(job.keys)
        self._kept[job.job_id] = [keys[index] for index in kept]
        return JobMetadata(
            job.job_id,
            self._kept[job.job_id],
            job.block_ids[kept],
            job.is_promotion,
            job.req_context,
            job.deadline,
        )

    def get_finished(self) -> Iterable[JobResult]:
        return [self._partial(result) for result in super().get_finished()]

    def _partial(self, result: JobResult) -> JobResult:
        kept = self._kept.pop(result.job_id, None)
        if kept is None:
            return result
        succeeded = kept if result.success else list(result.successful_keys or ())
        return JobResult(result.job_id, False, succeeded, reason="injected")
