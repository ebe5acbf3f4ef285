"""A guarded tier: one secondary tier, with its budgets, breaker, admission and deadlines."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.observe.history import BlockHistory
from tiered_kv.observe.notices import Notices
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.breaker import Breaker, BreakerState
from tiered_kv.tiering.events import TierEvents
from tiered_kv.tiering.isolation import IsolatedTier
from tiered_kv.tiering.pace import Pace
from tiered_kv.tiering.tier_observer import TierObserver, direction_of
from tiered_kv.tiering.write_budget import admission_of
from tiered_kv.toolkit.status import UNUSABLE_REASONS

HARMLESS_REASONS: Final = UNUSABLE_REASONS | {"absent", "missing", "no_space", "reset", "unanswered"}
"""Reasons for which a tier that works may fail a whole job: losing a block is allowed. The breaker ignores them.

`unanswered` is for blocks that a server does not answer for, while the tier's servers answer for others.
"""

_REASON = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""What a reason looks like. Counters and metrics have it as a label, so a sentence is none."""

_job_ids = itertools.count()


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """A job that was submitted to a tier.

    Its blocks are pinned for a store, in state writing for a load. They belong to the job until the tier has reported
    it, however long that takes. When its deadline has passed they are in quarantine, and its result does not count.
    """

    metadata: JobMetadata
    blocks: Sequence[CPUBlock]
    blocks_in_flight: int
    """Of this direction when it was submitted, its own included."""
    is_expired: bool = False


@dataclass(slots=True)
class _Budget:
    """Blocks that the jobs of one direction may take, and take; those of expired jobs are free at an unknown time."""

    blocks_max: int
    blocks: int = 0
    expired_blocks: int = 0


class GuardedTier:
    """Submits jobs to one tier within its budgets, and processes their results. Owned by the manager's thread.

    The budgets, by default `budget_bytes` each, count the blocks of a job until the tier has reported it,
    expired or not. So a tier that never reports can take its budgets and no more.

    A tier whose class does not say `is_nonblocking` gets a thread of its own. With `tells_events` somebody takes its
    events. `compute_block_s` are the seconds in which the engine computes a block, where somebody says. `wear_clock` is
    that of a write budget, by default `clock`.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        settings: TierSettings,
        block_bytes: int,
        budget_bytes: int,
        clock: Callable[[], float],
        notices: Notices | None = None,
        number: int = 1,
        history: BlockHistory | None = None,
        tells_events: bool = False,
        compute_block_s: float = math.inf,
        wear_clock: Callable[[], float] | None = None,
    ) -> None:
        self.name = settings.name
        self.number = number
        """Its place in the order of the search, the primary tier's being 0."""
        self.tier = tier if tier.is_nonblocking else IsolatedTier(tier, settings.lookup_timeout, clock)
        self.settings = settings
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_cooldown)
        self.admission = admission_of(settings, block_bytes, wear_clock or clock, self._moved_blocks)
        self.pace = Pace(compute_block_s)
        events = TierEvents(self.tier, self.name, block_bytes) if tells_events else None
        self.observer = TierObserver(self.name, number, block_bytes, notices or Notices(), history, events)
        self.counters = self.observer.counters
        self.measures = self.observer.measures
        self.jobs: dict[JobId, SubmittedJob] = {}
        self.is_disabled = False
        """Set for good when the tier cannot reset."""
        self.loads = _Budget(_blocks(settings.load_budget, budget_bytes, block_bytes))
        self.stores = _Budget(_blocks(settings.store_budget, budget_bytes, block_bytes))
        self.load_blocks_reserved = 0
        """Blocks taken for loads that will be submitted at the end of the step."""
        self.store_blocks_reserved = 0
        """Blocks that callers are about to store: see `TieringOffloadingManager.reserve_stores`."""
        self._clock = clock
        self._block_bytes = block_bytes
        self._lookup_failures = 0
        self._noted_state = self.breaker.state
        # All jobs have the same timeout, so the order of submission is the order of deadlines.
        self._unexpired: dict[JobId, SubmittedJob] = {}

    @property
    def is_searched(self) -> bool:
        """Whether lookups ask this tier: not if none of its blocks could be loaded."""
        if self.is_disabled or self.breaker.state is BreakerState.OPEN:
            return False
        return self.is_loading or self.loads.blocks < self.loads.blocks_max

    @property
    def is_loading(self) -> bool:
        """Whether load budget will become free in time: some of it is taken by loads that have not expired."""
        return self.load_blocks_reserved > 0 or self.loads.blocks > self.loads.expired_blocks

    @property
    def is_storing(self) -> bool:
        """Whether store budget will become free in time."""
        return self.store_blocks_reserved > 0 or self.stores.blocks > self.stores.expired_blocks

    def store_room(self) -> int:
        """Return how many blocks may be stored now."""
        return 0 if self.refusal() else self.stores.blocks_max - self.stores.blocks - self.store_blocks_reserved

    def is_full_for(self, num_blocks: int) -> bool:
        """Return whether a store of so many blocks finds no room now, and may find it later."""
        return not self.refusal() and (self.is_storing or self.store_room() > 0) and self.store_room() < num_blocks

    def load_room(self) -> int:
        """Return how many blocks may be loaded now."""
        return 0 if self.refusal() else self.loads.blocks_max - self.loads.blocks - self.load_blocks_reserved

    def refusal(self) -> str:
        """Return why no job may be submitted: "disabled", "breaker", or "" if jobs may be."""
        if self.is_disabled:
            return "disabled"
        state = self.breaker.state
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._unexpired):
            return "breaker"
        return ""

    def select(self, offered: list[CPUBlock], req_context: ReqContext) -> list[CPUBlock]:
        """Return the offered blocks that the tier stores, and count the others.

        It stores those that are admitted, head first, as far as its budget allows.
        """
        selected, refused, late = self.admission.select(offered, max(self.store_room(), 0), req_context.req_id)
        self.observer.skipped(self.admission.reason, refused)
        self.observer.skipped(self.refusal() or "budget", late)
        return selected

    def submit(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[CPUBlock],
        req_context: ReqContext,
        *,
        is_promotion: bool,
        job_id: JobId | None = None,
    ) -> SubmittedJob | None:
        """Give the tier a job: to load `keys` into the rows of `blocks`, or to store them from there.

        Returns:
            The job, named `job_id` or by a new number; None where the tier refuses it with an exception.
        """
        block_ids = np.array([block.block_id for block in blocks], dtype=np.int64)
        deadline = self._clock() + self.settings.job_timeout
        job_id = next(_job_ids) if job_id is None else job_id
        budget = self.loads if is_promotion else self.stores
        in_flight = budget.blocks + len(blocks)
        job = SubmittedJob(JobMetadata(job_id, keys, block_ids, is_promotion, req_context, deadline), blocks, in_flight)
        try:
            (self.tier.submit_load if is_promotion else self.tier.submit_store)(job.metadata)
        except Exception:
            self.observer.note_exception("submit_load" if is_promotion else "submit_store")
            self.observer.failed(job.metadata, len(keys), "exception")
            self.breaker.fail(self._clock())
            return None
        if is_promotion:
            self.admission.note_hits(keys)
        self.jobs[job_id] = self._unexpired[job_id] = job
        budget.blocks = in_flight
        self.counters.add("submitted_jobs_total", direction_of(job.metadata))
        return job

    def collect(self) -> list[tuple[SubmittedJob, JobResult]]:
        """Return the jobs that the tier reports as ended, expired ones included; their budget is free again."""
        results: list[JobResult] = []
        try:
            told = self.tier.get_finished()
            if not told:
                return []
            for result in told:  # results before an exception count: they are reported only once
                if isinstance(result, JobResult):
                    results.append(result)
        except Exception:
            self.observer.note_exception("get_finished")
            self.breaker.fail(self._clock())
        ended = []
        for told_of_job in results:
            try:
                job = self.jobs.pop(told_of_job.job_id, None)
            except TypeError:  # an id that no job can have
                job = None
            if job is None:
                self.counters.add("unknown_results_total")
                continue
            result = _believed(told_of_job)
            self._budget_of(job).blocks -= len(job.blocks)
            told_s, now_s = result.ended_s, self._clock()
            begun_s = (job.metadata.deadline or 0.0) - self.settings.job_timeout
            seconds = max(0.0, (told_s if told_s is not None and begun_s <= told_s <= now_s else now_s) - begun_s)
            self.measures.add_job(direction_of(job.metadata), seconds, len(job.blocks) * self._block_bytes)
            if job.metadata.is_promotion and result.success and not job.is_expired:
                self.pace.add(job.blocks_in_flight, seconds, now_s)
            if job.is_expired:
                self.counters.add("late_jobs_total")
                self._budget_of(job).expired_blocks -= len(job.blocks)
                self.breaker.answer()
            else:
                del self._unexpired[job.metadata.job_id]
                self._judge(job, result)
            ended.append((job, result))
        return ended

    def expire(self, now_s: float) -> list[SubmittedJob]:
        """Return the jobs whose deadline has passed just now; their blocks stay with them, in quarantine."""
        expired = []
        for job in self._unexpired.values():
            assert job.metadata.deadline is not None
            if job.metadata.deadline > now_s:
                break
            expired.append(job)
        for job in expired:
            del self._unexpired[job.metadata.job_id]
            job.is_expired = True
            self.counters.add("expired_jobs_total")
            self._budget_of(job).expired_blocks += len(job.blocks)
            if job.metadata.is_promotion:
                self.pace.add(job.blocks_in_flight, self.settings.job_timeout, now_s)
            self.observer.expired(job.metadata)
            self.breaker.fail(now_s)
        return expired

    def tick(self, now_s: float) -> None:
        """Update the breaker with the time, and with the lookups that the tier gave up since the last call."""
        try:
            failures = self.tier.lookup_failures
        except Exception:
            self.observer.note_exception("lookup_failures")
            failures = self._lookup_failures
        if failures != self._lookup_failures:
            self.counters.add("lookup_timeouts_total", count=failures - self._lookup_failures)
            self._lookup_failures = failures
            self.breaker.fail(now_s)
            self.observer.gave_up()
        self.breaker.tick(now_s)
        self.admission.tick()
        if self.breaker.state is not self._noted_state:
            self._noted_state = self.breaker.state
            self.observer.notice(f"breaker {self._noted_state.name.lower().replace('_', ' ')}")

    def disable(self, why: str) -> None:
        """Use the tier no more."""
        if not self.is_disabled:
            self.is_disabled = True
            self.observer.notice(f"disabled: {why}")

    def call(self, method: str, *arguments: object) -> Any:  # Any: as the tier's method returns
        """Call an optional method of the tier; an exception is counted, and the answer is None."""
        try:
            return getattr(self.tier, method)(*arguments)
        except Exception:
            self.observer.note_exception(method)
            return None

    def wants_all_of(self, req_context: ReqContext) -> bool:
        """Announce a new request to the tier; return whether it wants all blocks of the request at its end."""
        self.admission.begin(req_context.req_id)
        answer = self.call("on_new_request", req_context)
        return isinstance(answer, RequestOffloadingContext) and answer.policy is OffloadPolicy.REQUEST_LEVEL

    def counted(self) -> dict[str, Any]:
        """Return the tier's counts, as `Counters.snapshot`, and its own `stats` under "tier"."""
        stats = self.call("stats")
        block_bytes = self._block_bytes
        stores, loads = self.stores.blocks, self.loads.blocks + self.load_blocks_reserved
        return {
            **self.counters.snapshot(),
            **self.measures.snapshot(),
            **self.admission.counted(),
            "pinned_bytes": (stores + loads) * block_bytes,
            "store_budget_bytes": self.stores.blocks_max * block_bytes,
            "store_budget_used_bytes": stores * block_bytes,
            "load_budget_bytes": self.loads.blocks_max * block_bytes,
            "load_budget_used_bytes": loads * block_bytes,
            "jobs_in_flight": len(self.jobs),
            "quarantined_bytes": (self.loads.expired_blocks + self.stores.expired_blocks) * block_bytes,
            "breaker_state": self.breaker.state.value,
            "breaker_opened_total": self.breaker.times_opened,
            "tier": dict(stats) if isinstance(stats, Mapping) else {},
        }

    def reset_cache(self) -> None:
        """Let the tier forget every block; one that cannot is not used any more."""
        if not self.call("reset_cache"):
            self.disable("it cannot reset")
        self.observer.reset(list(self.jobs))

    def _moved_blocks(self) -> int:
        """Return how many blocks the tier says that it has moved within itself."""
        stats = self.call("stats")
        count = stats.get("relocated_blocks_total") if isinstance(stats, Mapping) else 0
        return count if isinstance(count, int) else 0

    def _budget_of(self, job: SubmittedJob) -> _Budget:
        return self.loads if job.metadata.is_promotion else self.stores

    def _judge(self, job: SubmittedJob, result: JobResult) -> None:
        """Count a job's result, and inform the breaker."""
        total = len(job.blocks)
        if result.success:
            done = total
        elif result.successful_keys is None:
            done = 0
        else:
            done = len(frozenset(result.successful_keys).intersection(job.metadata.keys))
        self.observer.ended(job.metadata, result, done, total)
        if done or not total:
            self.breaker.succeed()
        elif result.reason not in HARMLESS_REASONS:
            self.breaker.fail(self._clock())


def guard(
    tiers: Sequence[SecondaryTierManager],
    settings: Sequence[TierSettings] | None,
    primary: CPUOffloadingManager,
    clock: Callable[[], float],
    notices: Notices,
    history: BlockHistory | None,
    compute_block_s: float,
    wear_clock: Callable[[], float] | None,
) -> tuple[GuardedTier, ...]:
    """Return the guarded tiers below a primary tier, in their order; without `settings`, those of each `tier_type`."""
    settings = settings or [TierSettings(type=tier.tier_type) for tier in tiers]
    block_bytes = primary.backend.block_size
    budget_bytes = block_bytes * primary.backend.num_blocks // 4
    return tuple(
        GuardedTier(
            tier,
            limits,
            block_bytes,
            budget_bytes,
            clock,
            notices,
            number,
            history,
            primary.reports_events,
            compute_block_s,
            wear_clock,
        )
        for number, (tier, limits) in enumerate(zip(tiers, settings, strict=True), 1)
    )


def _believed(told: JobResult) -> JobResult:
    """Return a result whose fields have the right types; a job with an invalid result has failed."""
    try:
        keys = None if told.successful_keys is None else frozenset(told.successful_keys)
        reason = str(told.reason or "")
        is_word = not reason or _REASON.fullmatch(reason)
        ended_s = None if told.ended_s is None else float(told.ended_s)
        return JobResult(told.job_id, bool(told.success), keys, reason if is_word else "error", ended_s)
    except Exception:
        return JobResult(told.job_id, False, reason="nonsense")


def _blocks(budget_bytes: int | None, default_bytes: int, block_bytes: int) -> int:
    return max((default_bytes if budget_bytes is None else budget_bytes) // block_bytes, 1)
