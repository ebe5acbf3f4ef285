"""A guarded tier: one secondary tier, with its budgets, breaker, admission and deadlines.

The manager, `DirectTiers` and vLLM's tier make guarded tiers, and each calls them on one thread. No call does I/O,
waits, or raises for a fault of the tier. A job's rows and budget belong to the job until the tier has reported it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from tiered_kv.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from tiered_kv.config.limits import DEFAULT_TENANT, given_limits
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import HOURS_A_DAY
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.metrics.notices import Notices
from tiered_kv.reasons import Reason, TooSlow
from tiered_kv.tiering.account import TierAccount
from tiered_kv.tiering.admission import Admission, Offer
from tiered_kv.tiering.answers import (
    WrongValueError,
    checked_flag,
    checked_keys,
    checked_result,
    checked_stats,
    tier_exceptions,
)
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, ReportsJobs, SecondaryTierManager
from tiered_kv.tiering.breaker import Breaker, BreakerState
from tiered_kv.tiering.budget import Budget, blocks_of
from tiered_kv.tiering.isolation import IsolatedTier
from tiered_kv.tiering.outages import Outages
from tiered_kv.tiering.pace import EngineCost, Pace
from tiered_kv.tiering.write_budget import WriteBudget

T = TypeVar("T")
_job_ids = itertools.count()


class JobOwner(Protocol):
    """The object that submitted a job. `GuardedTier.poll` reports the job's end to it."""

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Process a job that the tier has reported. If the job had expired before, ignore the result."""

    def expired(self, job: SubmittedJob) -> None:
        """Process a job at its deadline. Its rows are in quarantine until `ended`."""


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """A job that a tier has accepted and not reported yet.

    A store's rows are pinned, a load's are in state writing. They belong to the job until the tier reports it. After
    the job's deadline they are in quarantine, and its result is ignored.
    """

    metadata: JobMetadata
    rows: Sequence[int]
    """As `metadata.block_ids`, in the order of `metadata.keys`."""
    owner: JobOwner
    blocks_in_flight: int
    """For a load: blocks that the tier moves up to the load's end, if it serves jobs in order; 0 for a store."""
    is_expired: bool = False

    def loaded_keys(self, result: JobResult) -> frozenset[OffloadKey]:
        """Return the keys that the tier has moved."""
        return frozenset(self.metadata.keys if result.success else result.successful_keys or ())


class GuardedTier:
    """Submits jobs to one tier within its budgets, and processes their results.

    A tier that never reports a job fills its own budgets only. A tier that may block gets a thread (`IsolatedTier`).

    Args:
        budget_bytes: Default of `load_budget` and of `store_budget`.
        number: The tier's position in the search order; the primary tier's is 0.
        reports_events: Whether events are collected for `TierAccount.take_events`.
        wear_clock: Clock of the write budget; default `clock`.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        settings: TierSettings,
        block_bytes: int,
        budget_bytes: int,
        clock: Callable[[], float],
        *,
        cost: EngineCost | None = None,
        number: int = 1,
        notices: Notices | None = None,
        history: BlockHistory | None = None,
        reports_events: bool = False,
        wear_clock: Callable[[], float] | None = None,
    ) -> None:
        self.name = settings.name
        self.number = number
        is_nonblocking = getattr(tier, "is_nonblocking", False) is True
        self.tier = tier if is_nonblocking else IsolatedTier(tier, settings.lookup_timeout, clock)
        self.settings = settings
        self.has_shares = given_limits(settings) is not None  # then a store has blocks of one tenant
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_cooldown)
        self.admission = Admission(settings.admit_after)
        if settings.write_budget is not None:
            hour_bytes = settings.write_budget // HOURS_A_DAY
            self.admission = WriteBudget(hour_bytes, block_bytes, wear_clock or clock, self._moved_blocks)
        self.pace = Pace(cost or EngineCost())
        event_source = self.tier if reports_events else None
        self.account = TierAccount(self.name, number, block_bytes, notices or Notices(), history, event_source)
        self.outages = Outages(settings, self.account, partial(self.call, "explain_failure"))
        if isinstance(self.tier, IsolatedTier):
            self.tier.note_exception = self.account.note_exception
        self.jobs: dict[JobId, SubmittedJob] = {}
        """Jobs that the tier has not reported yet, expired jobs among them."""
        self.lacking: dict[OffloadKey, None] = {}
        """The last blocks that the tier refused or failed to store, at most `lacking_max`; the oldest first."""
        self.lacking_max = 0
        self.is_disabled = False
        """True for the rest of the process once `disable` was called."""
        self.removal: ReportsJobs | None = None  # set while an operator has taken the tier out
        self.loads = Budget(blocks_of(settings.load_budget, budget_bytes, block_bytes))
        self.stores = Budget(blocks_of(settings.store_budget, budget_bytes, block_bytes))
        self._clock = clock
        self.block_bytes = block_bytes
        self._lookup_failures = 0  # the tier's own count, at the last call
        self._relocated_blocks = 0  # the same
        self._relocated_before = 0  # of tiers that were replaced
        self._counts_failures = self.overrides("lookup_failures")
        self._expects_requests = self.overrides("on_new_request")
        self._has_clock = self.admission.has_clock
        # Jobs before their deadline. All have the same timeout, so the order of submission is the order of deadlines.
        self.unexpired: dict[JobId, SubmittedJob] = {}

    @property
    def is_searched(self) -> bool:
        """Whether lookups ask this tier. They do not if none of its blocks could be loaded."""
        return not self.is_out and (self.loads.blocks < self.loads.blocks_max or self.loads.will_grow)

    @property
    def is_out(self) -> bool:
        """Whether no lookup and no job reaches the tier: it is disabled or taken out, or its breaker is open."""
        return self.is_disabled or self.removal is not None or self.breaker.state is BreakerState.OPEN

    def store_room(self) -> int:
        """Return how many blocks may be stored now."""
        return 0 if self.refusal() else self.stores.room

    def is_full_for(self, num_blocks: int) -> bool:
        """Return whether a store of `num_blocks` has no room now, and may have room later."""
        room = self.stores.room
        return not self.refusal() and room < num_blocks and (room > 0 or self.stores.will_grow)

    def load_room(self) -> int:
        """Return how many blocks may be loaded now."""
        return 0 if self.refusal() else self.loads.room

    def blocks_before_load(self, blocks: int) -> int:
        """Return how many other blocks a tier moves during a load of `blocks` blocks: all loads, and at most as many
        stores as loads."""
        loads = self.loads.blocks + blocks
        return self.loads.blocks + min(self.stores.blocks, loads)

    def refusal(self) -> Reason | None:
        """Return why no job may be submitted: `DISABLED`, `DRAINED` or `BREAKER`; None if jobs may be submitted."""
        if self.is_disabled or self.removal is not None:
            return Reason.DISABLED if self.is_disabled else Reason.DRAINED
        state = self.breaker.state
        if state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self.unexpired):
            return None
        return Reason.BREAKER

    def select(self, offered: Offer, req_context: ReqContext) -> Offer:
        """Return the admitted blocks, head first and within the store budget. All other blocks count as skipped."""
        selected, refused, late = self.admission.select(offered, max(self.store_room(), 0), req_context.req_id)
        self.account.skipped(self.admission.reason, refused)
        if late:
            self.account.skipped(self.refusal() or Reason.BUDGET, late)
            self._lack(late)
        return selected

    def submit(
        self,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        req_context: ReqContext,
        owner: JobOwner,
        *,
        is_promotion: bool,
        job_id: JobId | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> SubmittedJob | None:
        """Submit a job of `owner`, a load into `rows` or a store of these; return it, or None if the tier raised."""
        block_ids = np.array(rows, dtype=np.int64)
        deadline = self._clock() + self.settings.job_timeout
        job_id = next(_job_ids) if job_id is None else job_id
        budget = self.loads if is_promotion else self.stores
        in_flight = self.blocks_before_load(len(rows)) + len(rows) if is_promotion else 0
        tenant = tenant if self.has_shares else DEFAULT_TENANT  # so that stores of several tenants run together
        metadata = JobMetadata(job_id, keys, block_ids, is_promotion, req_context, deadline, tenant)
        job = SubmittedJob(metadata, rows, owner, in_flight)
        try:
            (self.tier.submit_load if is_promotion else self.tier.submit_store)(job.metadata)
        except tier_exceptions():
            self.account.note_exception("submit_load" if is_promotion else "submit_store")
            self.account.failed(job.metadata, len(keys), Reason.EXCEPTION)
            self._lack(() if is_promotion else keys)
            self.breaker.fail(self._clock(), self.outages.cause_of(is_promotion, Reason.EXCEPTION))
            return None
        if is_promotion:
            self.admission.note_hits(keys)
        self.jobs[job_id] = self.unexpired[job_id] = job
        budget.blocks += len(rows)
        self.account.submitted(metadata)
        return job

    def overrides(self, method: str) -> bool:
        """Return whether the tier's class overrides a method, or property, of the contract."""
        return getattr(type(self.tier), method, None) is not getattr(SecondaryTierManager, method)

    def poll(self, now_s: float) -> None:
        """Report ended and expired jobs to their owners; update breaker and admission."""
        for job, result in self._collect():
            job.owner.ended(job, result)
        if self.unexpired:
            for job in self._expire(now_s):
                job.owner.expired(job)
        if self._counts_failures:
            self._count_failures(now_s)
        if self._has_clock:
            self.admission.tick()
        if self.breaker.state is not BreakerState.CLOSED or self.outages.is_on:
            if self.breaker.state is BreakerState.OPEN:
                self.breaker.tick(now_s)
            self.outages.follow(self.breaker, now_s)

    def _collect(self) -> Sequence[tuple[SubmittedJob, JobResult]]:
        """Return the jobs that the tier has reported, including expired ones, and free their budget."""
        results: list[JobResult] = []
        is_wrong = False
        try:
            reported = (self.removal or self.tier).get_finished()
            if not reported:
                return ()
            for result in reported:  # results before an exception count: they are reported only once
                try:
                    results.append(checked_result(result))
                except WrongValueError:
                    self.account.note_exception("get_finished")
                    self.account.unknown_result()
                    is_wrong = True
        except tier_exceptions():
            self.account.note_exception("get_finished")
            is_wrong = True
        if is_wrong:
            self.breaker.fail(self._clock(), "its 'get_finished' raised an exception, or returned what is no result")
        ended = []
        for result in results:
            job = self.jobs.pop(result.job_id, None)
            if job is None:
                self.account.unknown_result()
                continue
            self._budget_of(job).blocks -= len(job.rows)
            ended_s, now_s = result.ended_s, self._clock()
            begun_s = (job.metadata.deadline or 0.0) - self.settings.job_timeout
            if ended_s is None or not begun_s <= ended_s <= now_s:  # a tier may use another clock
                ended_s = now_s
            seconds = max(0.0, ended_s - begun_s)
            self.account.reported(job.metadata, seconds, is_late=job.is_expired)
            loaded = len(job.rows) if result.success else len(result.successful_keys or ())
            # An absent block is reported sooner than a loaded one: a load with many of them measures nothing.
            if job.metadata.is_promotion and 0 < len(job.rows) <= 2 * loaded and not job.is_expired:
                self.pace.add(job.blocks_in_flight, seconds, now_s)
            if job.is_expired:
                self._budget_of(job).expired_blocks -= len(job.rows)
                self.breaker.answer()
            else:
                del self.unexpired[job.metadata.job_id]
                self._judge(job, result)
            ended.append((job, result))
        return ended

    def _expire(self, now_s: float) -> list[SubmittedJob]:
        """Return the jobs that have passed their deadline since the last call; their blocks are now in quarantine."""
        jobs = self.unexpired.values()
        expired = [*itertools.takewhile(lambda job: (job.metadata.deadline or 0.0) <= now_s, jobs)]
        for job in expired:
            del self.unexpired[job.metadata.job_id]
            job.is_expired = True
            self._budget_of(job).expired_blocks += len(job.rows)
            if job.metadata.is_promotion and job.rows:
                self.pace.add(job.blocks_in_flight, self.settings.job_timeout, now_s)
            self._lack(() if job.metadata.is_promotion else job.metadata.keys)
            self.account.expired(job.metadata)
            self.breaker.fail(now_s, self.outages.cause_of(job.metadata.is_promotion, Reason.EXPIRED))
        return expired

    def _count_failures(self, now_s: float) -> None:
        """Count lookup failures that the tier reports. All failures since the last call are one for the breaker."""
        before = self._lookup_failures
        self._lookup_failures = failures = self._ask("lookup_failures", operator.index, before)
        if failures > before:
            self.account.lookups_timed_out(failures - before, is_for_history=True)
            self.breaker.fail(now_s)

    def note_too_slow(self, blocks: int, reason: TooSlow) -> None:
        """Count blocks of the tier that are not loaded, for `reason` or because the tier's times are unknown."""
        self.account.too_slow(blocks, reason if self.pace.is_known else TooSlow.LEARNING)

    def disable(self, why: str) -> None:
        """Stop using the tier until the process ends."""
        if not self.is_disabled:
            self.is_disabled = True
            self.outages.disable(why)

    def replace(self, tier: SecondaryTierManager) -> None:
        """Use another object for the same tier from now on. `removal` still reports the jobs of the one before."""
        self._relocated_before, self._relocated_blocks = self._relocated_before + self._relocated_blocks, 0
        self.tier = tier
        self.account.follow(tier)

    def call(self, method: str, *arguments: object) -> Any:  # Any: as the tier's method returns
        """Call a method of the tier; an exception is counted, and the result is then None."""
        return self.call_of(self.tier, method, *arguments)

    def call_of(self, tier: SecondaryTierManager, method: str, *arguments: object) -> Any:  # Any: as `call`
        """Call a method of the tier, or of an object that was in its place; see `call`."""
        try:
            return getattr(tier, method)(*arguments)
        except tier_exceptions():
            self.account.note_exception(method)
            return None

    def take_absent(self) -> Sequence[OffloadKey]:
        """Return the touched blocks that the tier has not found."""
        return self._ask("take_absent", checked_keys, ())

    def wants_all_of(self, req_context: ReqContext) -> bool:
        """Report a new request to the tier; return whether it wants all blocks of the request at its end."""
        self.admission.begin(req_context.req_id)
        if not self._expects_requests:
            return False
        answer = self.call("on_new_request", req_context)
        return isinstance(answer, RequestOffloadingContext) and answer.policy is OffloadPolicy.REQUEST_LEVEL

    def stats(self) -> dict[str, Any]:
        """Return the tier's own counters. Any thread may call."""
        return self._ask("stats", checked_stats, {})

    def reset_cache(self) -> None:
        """Reset the tier; disable it if it cannot reset."""
        if not self._ask("reset_cache", checked_flag, False):
            self.disable("it cannot reset")
        self.account.reset([job.metadata for job in self.jobs.values()])

    def _moved_blocks(self) -> int:
        self._relocated_blocks = self._ask("relocated_blocks", operator.index, self._relocated_blocks)
        return self._relocated_before + self._relocated_blocks

    def _ask(self, name: str, check: Callable[[Any], T], otherwise: T) -> T:
        """Return the value of a method or property of the tier; `otherwise` after an exception, which is counted."""
        try:
            found = getattr(self.tier, name)
            return check(found() if callable(found) else found)
        except tier_exceptions():
            self.account.note_exception(name)
            return otherwise

    def _lack(self, keys: Iterable[OffloadKey]) -> None:
        """Remember blocks that were not stored."""
        if self.lacking_max:
            self.lacking.update(dict.fromkeys(keys))
            while len(self.lacking) > self.lacking_max:
                del self.lacking[next(iter(self.lacking))]

    def _budget_of(self, job: SubmittedJob) -> Budget:
        return self.loads if job.metadata.is_promotion else self.stores

    def _judge(self, job: SubmittedJob, result: JobResult) -> None:
        """Count a job's result, and inform the breaker."""
        total = len(job.rows)
        done = total if result.success else len(job.loaded_keys(result).intersection(job.metadata.keys))
        self.account.ended(job.metadata, result, done, total)
        is_store = not job.metadata.is_promotion
        if is_store and done < total:
            self._lack(set(job.metadata.keys) - job.loaded_keys(result))
        if is_store and total and (not done or self.outages.lacks_room):
            self.outages.note_store(done > 0, result, self._clock())
        if done or not total:
            self.breaker.succeed()
        elif not result.cause.is_ignored(is_store=is_store):
            self.breaker.fail(self._clock(), self.outages.cause_of(not is_store, result.cause, result.word))
