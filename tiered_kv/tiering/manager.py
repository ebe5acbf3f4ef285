"""The manager that an engine's scheduler calls: a primary tier with secondary tiers below it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tiered_kv.base import (
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from tiered_kv.config.settings import PRIMARY_NAME, TierSettings
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.metrics.notices import Notices
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import Family, by_label, numbers
from tiered_kv.metrics.step_timer import StepTimer, timed
from tiered_kv.metrics.vocabulary import ACCOUNT, PRIMARY
from tiered_kv.reasons import Fate, Reason
from tiered_kv.system.threads import PAUSES_MAX, STEP
from tiered_kv.tiering.account import EventSink, PrimaryAccount
from tiered_kv.tiering.answers import checked_flag, tier_exceptions
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.cascade import Cascade
from tiered_kv.tiering.gauges import report_tier
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob
from tiered_kv.tiering.interface import CalledManager
from tiered_kv.tiering.pace import EngineCost
from tiered_kv.tiering.prefetch import Prefetches
from tiered_kv.tiering.promotions import Promotions
from tiered_kv.tiering.requests import ManagerLimits, RequestState, RequestTable
from tiered_kv.tiering.search import Search, ask_tier
from tiered_kv.tiering.uses import Uses

_DRAIN_POLL_S = 0.0005
_NONE_READY = 1 << 29  # more pins than a block has


class TieringOffloadingManager(CalledManager):
    """Cascades stores to secondary tiers, and promotes loads from them.

    Only `drain_jobs` and `shutdown` wait. The other methods do no I/O, and take no lock that a worker holds across I/O.

    Args:
        secondary_tiers: The tiers below it, in search order. One that is not `is_nonblocking` runs on its own thread.
        settings: The limits and the name of each tier; by default those of its `tier_type`.
        block_tokens: Tokens of a block; 0 if unknown.
        compute_block_s: Seconds in which the engine computes a block. Blocks that would arrive later are not promoted.
        history: Receives why requests missed blocks; optional. It has the names of all tiers. `shutdown` closes it.
        event_sink: Receives the events of all tiers at the end of each step; optional. `take_events` is then empty.
            `shutdown` closes it. Tiers have events if the primary tier `reports_events`.
        wear_clock: Clock of write budgets; default `clock`. A simulation passes the time of its requests.

    Attributes:
        notices: The last changes of state of all tiers.
    """

    def __init__(
        self,
        primary: CPUOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] = (),
        *,
        settings: Sequence[TierSettings] | None = None,
        limits: ManagerLimits | None = None,
        block_tokens: int = 0,
        compute_block_s: float = math.inf,
        history: BlockHistory | None = None,
        event_sink: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        wear_clock: Callable[[], float] | None = None,
    ) -> None:
        self.primary = primary
        self.secondary_tiers = list(secondary_tiers)
        self.limits = limits or ManagerLimits()
        self._clock = clock
        self.cost = self.shown_cost = EngineCost(compute_block_s)
        """The engine's cost of computing; and, of several engines, the cost that the gauges show."""
        self.notices = Notices()
        block_bytes, num_blocks = primary.backend.block_size, primary.backend.num_blocks
        settings = settings or [TierSettings(type=tier.tier_type) for tier in self.secondary_tiers]
        self._tiers = tuple(
            GuardedTier(
                tier,
                tier_settings,
                block_bytes,
                block_bytes * num_blocks // 4,
                clock,
                cost=self.cost,
                number=number,
                notices=self.notices,
                history=history,
                reports_events=primary.reports_events,
                wear_clock=wear_clock,
            )
            for number, (tier, tier_settings) in enumerate(zip(self.secondary_tiers, settings, strict=True), 1)
        )
        self._cascade = Cascade(primary)
        self._uses = Uses(primary, self._tiers, clock)
        self._promotions = Promotions(primary, self._promotions_max(num_blocks), self.limits.hold_s, clock, self._fill)
        self._requests = RequestTable(
            self.limits.requests_max, self.limits.wait_max_s, self._end_request, clock, primary.outdated, self.cost
        )
        self._search = Search(self._tiers, self._promotions, self._requests, self.limits.wait_max_s, clock, history)
        self._lookup_below = self._search.below
        self._primary_blocks = primary.blocks  # the same dictionary, one attribute access less
        self._load_skippers = primary.load_skippers
        self._ready_min = 0
        """The least `ref_cnt` of a block that `lookup` finds itself: of none while any request skips loads."""
        # A step's end with nothing to do is free: what has something to do at each is known from here on.
        self._gathering_tiers = tuple(guarded for guarded in self._tiers if guarded.overrides("on_schedule_end"))
        self._has_event_sink = event_sink is not None
        self._counting_tiers = tuple(guarded for guarded in self._tiers if not guarded.admission.is_open())
        self._prefetches = Prefetches(self, self._promotions, self._search)
        accounts = [guarded.account for guarded in self._tiers]
        self._history = history
        self._account = PrimaryAccount(primary, accounts, history, event_sink, block_tokens)
        self.step_timer = StepTimer(clock)
        self.registry = Registry()
        self.registry.add(self._measure)
        for guarded in self._tiers:
            report_tier(guarded, self.registry)
        self.registry.add(self._account.measure)
        self._is_closed = False

    # Lookups.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        STEP.pauses_left = PAUSES_MAX  # `STEP.begin`: a call would take half as long as all else
        block = self._primary_blocks.get(key)
        if block is not None and block.ref_cnt >= self._ready_min:
            block.step = self.primary.step
            return True
        return self._lookup_below(key, block, req_context)

    @timed
    def has_row(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return key in self._primary_blocks

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        STEP.begin()
        if self._load_skippers and req_context.req_id in self._load_skippers:
            self._search.below_many(keys, self._primary_blocks, req_context)
            return [False] * len(keys)
        get, step = self._primary_blocks.get, self.primary.step
        missing: dict[OffloadKey, None] = {}
        for key in keys:
            block = get(key)
            if block is not None and block.ref_cnt >= 0:
                block.step = step
            else:
                missing[key] = None
        if not missing:
            return [True] * len(keys)
        below = self._search.below_many(missing, self._primary_blocks, req_context)
        return [below.get(key, True) for key in keys]

    def contains_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        get = self._primary_blocks.get
        found: dict[OffloadKey, bool | None] = {
            key: True for key in keys if (block := get(key)) is not None and block.ref_cnt >= 0
        }
        rest = [key for key in dict.fromkeys(keys) if key not in found]
        for guarded in self._tiers:
            if rest:
                found.update(zip(rest, ask_tier(guarded, rest, req_context, self._clock()), strict=True))
                rest = [key for key in rest if found[key] is False]
        return [found.get(key, False) for key in keys]

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        state = self._requests.state_of(req_context)
        state.loads.waits_for_room, state.loads.lacking = True, None
        if self._search.room.is_waiting(state):  # its first block comes first, whichever tier has it
            ready = list(itertools.takewhile(self._is_ready, keys))
            head = self._lookup_prefix(keys[: len(ready) + 1], state)
            if state.loads.lacking is not None:
                return [*head, *[None] * (len(keys) - len(head))]
        return self._lookup_prefix(keys, state)

    def _lookup_prefix(self, keys: Sequence[OffloadKey], state: RequestState) -> list[bool | None]:
        answers = self._answer_prefix(keys, state)
        needed = None if all(answers) else keys[next(index for index, answer in enumerate(answers) if not answer)]
        self._search.room.note(state, needed)
        return answers

    def _is_ready(self, key: OffloadKey) -> bool:
        block = self._primary_blocks.get(key)
        return block is not None and block.ref_cnt >= 0

    def _answer_prefix(self, keys: Sequence[OffloadKey], state: RequestState) -> list[bool | None]:
        req_context = state.req_context
        if req_context.req_id in self._load_skippers or state.lookups.timed_out:
            return self.lookup_many(keys, req_context)  # which asks no tier, or none that has failed this request
        below = [key for key in keys if key not in self._primary_blocks]  # the others are there, or being written
        if not below:
            return self.lookup_many(keys, req_context)
        found = dict(zip(below, self.contains_many(below, req_context), strict=True))
        end = next((index for index, key in enumerate(keys) if found.get(key) is False), len(keys))
        asked = [*keys[:end], *(key for key in keys[end:] if found.get(key) is False)]
        answers = dict(zip(asked, self.lookup_many(asked, req_context), strict=True))
        return [answers.get(key) for key in keys]

    def let_go(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = self._requests.get(req_context)
        if state is not None and state.loads.held:
            self._promotions.release(state, keys)

    def prefetch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._prefetches.begin(keys, self._requests.state_of(req_context))

    def end_prefetch(self, req_context: ReqContext) -> None:
        state = self._requests.get(req_context)
        if state is not None:
            self._prefetches.leave(state)

    def expect(self, blocks: int, req_context: ReqContext, *, before: int = 0, is_whole: bool = False) -> None:
        self._search.expect(blocks, before, self._requests.state_of(req_context), is_whole=is_whole)

    def use_cost(self, cost: EngineCost, req_context: ReqContext) -> None:
        """Decide a request's loads by what computing costs its engine, one of several, from now on."""
        self._requests.state_of(req_context).cost = cost

    def is_ahead(self, req_context: ReqContext) -> bool:
        """Return whether the prefetch of a request may still find blocks, or left some that would come too late."""
        state = self._requests.get(req_context)
        if state is None:
            return False
        return state in self._prefetches.running or bool(state.loads.promoting) or state.loads.is_cut

    def promoting(self, req_context: ReqContext) -> int:
        state = self._requests.get(req_context)
        return 0 if state is None else len(state.loads.promoting)

    def hit_tier(self, key: OffloadKey, req_context: ReqContext) -> str:
        state = self._requests.get(req_context)
        return PRIMARY_NAME if state is None else state.loads.sources.get(key, PRIMARY_NAME)

    def sources_of(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the tier of each block that was promoted for a request."""
        state = self._requests.get(req_context)
        return {} if state is None else state.loads.sources

    # The engine's transfers.

    @timed
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        STEP.begin()
        spec = self.primary.prepare_load(keys, req_context)
        self._prefetches.leave(self._note_load(keys, req_context))
        return spec

    @timed
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary.complete_load(keys, req_context)
        self._offer_again(keys, req_context)

    @timed
    def lease(self, blocks: list[CPUBlock], req_context: ReqContext) -> None:
        """Pin distinct ready blocks for a request's load. Unlike `prepare_load`, it does not end the prefetch."""
        STEP.begin()
        self.primary.lease(blocks, req_context)
        self._note_load([block.key for block in blocks], req_context)

    def _note_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> RequestState:
        state = self._requests.state_of(req_context)
        log = None if self._history is None else self._requests.log_of(state)
        self._account.loaded(keys, log, state.loads.sources)
        if state.loads.held:
            self._promotions.release(state, keys)
        state.stores.note(keys)
        self._uses.note(keys)
        return state

    @timed
    def end_leases(self, blocks: Collection[CPUBlock], req_context: ReqContext) -> None:
        """Release the pins of `lease`."""
        keys = [block.key for block in blocks] if self._counting_tiers else []
        self.primary.unpin(blocks)
        self._offer_again(keys, req_context)

    def _offer_again(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Offer loaded blocks to tiers that count how often a block is offered."""
        if self._counting_tiers and self.primary.hints_of(req_context).skips_store:
            return
        state = self._requests.get(req_context)
        for guarded in self._counting_tiers:
            if state is not None and guarded in state.stores.request_level:
                continue  # it is offered the blocks at the request's end
            # A load counts as an offer, except to the tier that the block came from.
            offered = [key for key in dict.fromkeys(keys) if self.hit_tier(key, req_context) != guarded.name]
            found = [self._primary_blocks.get(key) for key in offered]
            ready = [block for block in found if block is not None and block.ref_cnt >= 0]
            again = guarded.admission.again(ready, req_context.req_id)
            self._cascade.offer(again, (guarded,), self._context_of(req_context))

    @timed
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        STEP.begin()
        output = self.primary.prepare_store(keys, req_context)
        if self._tiers and req_context.req_id:
            state = self._requests.state_of(req_context)
            state.stores.note(keys)
            if output is not None:
                state.stores.pending += len(output.keys_to_store)
                state.stores.is_kept &= len(output.keys_to_store) == len(keys)  # tiers may have skipped the others
        if output is not None and len(output.keys_to_store) < len(keys):
            self._uses.note(keys)
        return output

    @timed
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written = self.primary.written_blocks(keys, req_context)
        state = self._requests.get(req_context)
        request_level = state.stores.request_level if state is not None else ()
        if not success:
            self.primary.abandon(written)
        elif written:
            stored = [block.key for block in written]
            self._account.stored(stored)
            self._uses.count_stored(len(stored))
            tiers = [tier for tier in self._tiers if tier not in request_level] if request_level else self._tiers
            is_kept = self._cascade.commit(written, stored, tiers, self._context_of(req_context))
            if state is not None and not is_kept:
                state.stores.is_kept = False
        if state is not None:
            state.stores.pending -= len(written)
            if state.is_finished and state.stores.pending <= 0 and not state.stores.unready:
                self._end_request(state)

    def store_granted(
        self, keys: Sequence[OffloadKey], rows: Sequence[CPUBlock], req_context: ReqContext
    ) -> list[CPUBlock]:
        """Store blocks that are written already, into rows of `primary.grant`; return the rows that were not used."""
        unused = self.primary.adopt(keys, rows, req_context)
        rest = set(map(id, unused))
        stored = [key for key, block in zip(keys, rows, strict=True) if id(block) not in rest]
        if self._tiers and req_context.req_id:
            state = self._requests.state_of(req_context)
            state.stores.note(keys)
            state.stores.pending += len(stored)
        self.complete_store(stored, req_context)
        return unused

    @timed
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary.touch(keys, req_context)
        state = self._requests.get(req_context)
        if state is not None:
            state.stores.note(keys)
        self._uses.note(keys)

    # Requests and steps.

    @timed
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self.primary.is_outdated(req_context):
            self.on_request_finished(req_context)  # the id is used again
        known = self._requests.get(req_context)
        stores_pending = 0
        if known is not None and known.is_finished:  # the id is reused while the last stores are in flight
            stores_pending = known.stores.pending  # they are told apart by the id alone
            self._end_request(known)
        self.primary.on_new_request(req_context)
        hints = self.primary.hints_of(req_context)
        state = self._requests.state_of(req_context)
        if not req_context.req_id:
            return RequestOffloadingContext()
        state.stores.pending += stores_pending
        if hints.skips_load:
            state.lookups.misses_all = Fate.BY_REQUEST
            self._ready_min = _NONE_READY
        state.stores.request_level = tuple(guarded for guarded in self._tiers if guarded.wants_all_of(req_context))
        if hints.skips_store:
            state.stores.request_level = ()
        policy = OffloadPolicy.REQUEST_LEVEL if state.stores.request_level else OffloadPolicy.BLOCK_LEVEL
        return RequestOffloadingContext(policy)

    @timed
    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._requests.get(req_context) if req_context.req_id else None
        self.primary.outdated.pop(req_context.req_id, None)
        if state is None:
            self.primary.forget_request(req_context.req_id)
            return
        if state.stores.request_level:  # other requests' stores and promotions
            found = [self._primary_blocks.get(key) for key in state.stores.keys]
            writing = [block for block in found if block is not None and block.ref_cnt < 0]
            state.stores.unready = [block.key for block in writing if block.writer != req_context.req_id]
        if state.stores.pending > 0 or state.stores.unready:
            self._requests.finish(state)
            self.primary.forget_request(req_context.req_id)
            self._promotions.leave(state)
            self._search.room.leave(state)
            self._prefetches.leave(state)
        else:
            self._end_request(state)

    def on_schedule_end(self) -> None:
        began_s = self._clock()
        if self._prefetches.running:
            self._prefetches.ask()
        self._submit()
        self._collect()
        self.primary.on_schedule_end()
        if self._ready_min and not self._load_skippers:
            self._ready_min = 0
        if self._has_event_sink:
            self._account.publish()
        STEP.end()
        self.step_timer.end_step(began_s)

    @timed
    def poll(self) -> None:
        self._collect()

    def _collect(self) -> None:
        now_s = self._clock()
        for guarded in self._tiers:
            guarded.poll(now_s)
        if self._promotions.holders:
            self._promotions.release_overdue(now_s)
        if self._requests.finished or "" in self._requests.states:
            self._end_finished(now_s)
        if now_s >= self._uses.due_s:
            self._uses.act(now_s)
        self._search.refresh(now_s)

    def _end_finished(self, now_s: float) -> None:
        """End the finished requests whose last stores have ended, and those whose time is over."""
        for state in [state for state in self._requests.finished if state.stores.unready]:
            found = [self._primary_blocks.get(key) for key in state.stores.unready]
            state.stores.unready = [block.key for block in found if block is not None and block.ref_cnt < 0]
            if state.stores.pending <= 0 and not state.stores.unready:
                self._end_request(state)
        self._requests.expire(now_s)

    def _fill(self, job: SubmittedJob, ready: list[CPUBlock]) -> None:
        """Offer promoted blocks to the tiers above their source."""
        context = self._context_of(job.metadata.req_context)
        if not self._is_closed and not self.primary.hints_of(context).skips_store:
            self._cascade.fill(ready, self._tiers, context)

    def take_events(self) -> list[OffloadingEvent]:
        return self._account.take_events()

    # Emptying and closing.

    @property
    def epoch(self) -> int:
        return self.primary.epoch

    @property
    def num_rows(self) -> int:
        return self.primary.backend.num_blocks

    @property
    def has_tiers_below(self) -> bool:
        return bool(self._tiers)

    def stores_nothing_of(self, req_context: ReqContext) -> bool:
        return self.is_outdated(req_context) or self.primary.hints_of(req_context).skips_store

    def has_kept(self, req_context: ReqContext) -> bool:
        state = self._requests.get(req_context)
        return bool(self._tiers) and state is not None and state.stores.is_kept

    def is_outdated(self, req_context: ReqContext) -> bool:
        return self.primary.is_outdated(req_context)

    @property
    def has_saved_reset(self) -> bool:
        """Whether the last reset holds after an end of this process, too: the storage of each tier has it."""
        try:
            saved = [checked_flag(guarded.tier.has_saved_reset) for guarded in self._tiers]
        except tier_exceptions():
            return False
        return all(saved) and not self.disabled_tiers()  # one that cannot reset has old blocks

    @property
    def is_sweeping(self) -> bool:
        """Whether rows from before a reset will become free in later steps."""
        return bool(self.primary.orphans.unswept)

    @property
    def jobs_in_flight(self) -> int:
        return sum(len(guarded.jobs) for guarded in self._tiers)

    def limit_promotions(self, rows: int) -> None:
        """Let promotions, and blocks held for requests, take their share of so many rows: others cannot be used yet."""
        self._promotions.blocks_max = self._promotions_max(rows)

    def _promotions_max(self, rows: int) -> int:
        share = max(rows // 2, 1)
        most = self.limits.promotion_blocks_max or share
        return most if rows == self.num_rows else min(most, share)

    def spare_own(self, req_context: ReqContext) -> None:
        self.primary.chain_of(req_context).spares_own = True

    def reserve_stores(self, num_blocks: int) -> bool:
        if any(guarded.is_full_for(num_blocks) for guarded in self._tiers):
            return False
        self.release_stores(-num_blocks)
        return True

    def release_stores(self, num_blocks: int) -> None:
        for guarded in self._tiers:
            guarded.stores.reserved_blocks -= num_blocks

    def drain_jobs(self, timeout_s: float) -> bool:
        """Wait until every job has been reported, and counted; return False after `timeout_s`."""
        is_drained = self._drain(timeout_s)
        self._account.settle()
        return is_drained

    def _drain(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        self._uses.tell(self._clock(), most=None)
        while True:
            self._submit()
            self.poll()
            is_drained = not self.jobs_in_flight
            if is_drained or time.monotonic() >= end_s:
                return is_drained
            time.sleep(_DRAIN_POLL_S)

    def reset_cache(self) -> None:
        """Forget every block in every tier, and disable tiers that cannot reset: their blocks are not valid any more.

        Rows in flight become free when their transfers have ended. Requests that have begun store and load nothing
        until they end; calls without a request id, see `CPUOffloadingManager.reset_cache`.
        """
        self._forget_primary()
        self.notices.add(PRIMARY_NAME, "cache reset")
        for guarded in self._tiers:
            guarded.reset_cache()
        self._account.publish_reset()
        self._search.refresh(self._clock())

    def outdate(self, req_context: ReqContext) -> None:
        self._outdate(self._requests.state_of(req_context))

    def _forget_primary(self) -> None:
        self._account.resetting()
        self._promotions.reset()
        self._prefetches.clear()
        self._uses.clear()
        for state in list(self._requests.states.values()):
            state.forget_blocks()
            if state.is_finished:
                self._end_request(state)
            elif state.req_context.req_id:
                self._outdate(state)
        self.primary.reset_cache(is_reported=not self._has_event_sink)
        self._primary_blocks = self.primary.blocks
        self._ready_min = _NONE_READY if self._load_skippers else 0

    def _outdate(self, state: RequestState) -> None:
        state.lookups.misses_all = Fate.RESET
        state.stores.request_level = ()
        self.primary.outdate([state.req_context.req_id])
        self._ready_min = _NONE_READY

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """As in `CacheManager`. If a tier still holds primary blocks after that, the region stays mapped."""
        if self._is_closed:
            return
        self._is_closed = True
        for state in list(self._requests.states.values()):
            if state.is_finished:
                self._end_request(state)
            else:
                self._promotions.leave(state)
        self._close_tiers(timeout_s)
        for state in list(self._requests.states.values()):
            self._account.request_ended(state.log)
        self._requests.states.clear()
        self._search.stop()
        self._account.close()
        self.primary.shutdown(unmap=not self.jobs_in_flight)

    def _close_tiers(self, timeout_s: float) -> None:
        self._drain(timeout_s)  # a long queue of the history would take seconds more
        self._uses.stop()  # a job that begins from now on is not reported any more
        for guarded in self._tiers:
            for state in self._requests.states.values():
                guarded.call("on_request_finished", state.req_context)
            guarded.call("shutdown")
        self.poll()

    def _measure(self) -> Iterator[tuple[str, list[Family]]]:
        """Yield the counts of the primary tier, and of requests. Any thread may call."""
        counts = {
            **self.primary.snapshot(),
            **self.shown_cost.snapshot(),
            "promotion_blocks": self._promotions.blocks_taken,
            "released_holds_total": self._promotions.released_holds,
            "forgotten_requests_total": self._requests.forgotten,
        }
        skipped = {Reason.BY_REQUEST.value: self.primary.skipped_blocks} if self.primary.skipped_blocks else {}
        yield (
            PRIMARY_NAME,
            [
                *numbers(PRIMARY, counts),
                by_label(ACCOUNT["skipped_blocks_total"], skipped),
                Family(PRIMARY["step_seconds"], {(): self.step_timer.seconds.snapshot()}),
            ],
        )

    def estimates(self) -> dict[str, dict[str, float]]:
        """Return the gauges of the times that decide whether blocks are loaded, by tier. Any thread may call."""
        of_tiers = {guarded.name: guarded.pace.snapshot() for guarded in self._tiers}
        return {PRIMARY_NAME: self.shown_cost.snapshot(), **of_tiers}

    def disabled_tiers(self) -> set[str]:
        """Return the names of the tiers that are not used any more. Any thread may call."""
        return {guarded.name for guarded in self._tiers if guarded.is_disabled}

    def _submit(self) -> None:
        """Submit the step's promotions, and end the step in the tiers."""
        if self._promotions.batches:
            self._promotions.submit()
        for guarded in self._gathering_tiers:
            guarded.call("on_schedule_end")

    def _end_request(self, state: RequestState) -> None:
        """Offer all blocks of a request to the tiers that wait for its end, then forget the request."""
        if state.stores.request_level:
            found = [self._primary_blocks.get(key) for key in state.stores.keys]
            ready = [block for block in found if block is not None and block.ref_cnt >= 0]
            ready = self.primary.chain_of(state.req_context).in_order(ready)
            self._cascade.offer(ready, state.stores.request_level, state.req_context)
        self._account.request_ended(state.log)
        self._promotions.leave(state)
        self._search.room.leave(state)
        self._prefetches.leave(state)
        self._requests.pop(state)
        self.primary.forget_request(state.req_context.req_id)
        for guarded in self._tiers:
            guarded.call("on_request_finished", state.req_context)

    def _context_of(self, req_context: ReqContext) -> ReqContext:
        """Return the context for a job of a request: one of no request if the tiers were told of the request's end."""
        is_over = req_context.req_id and req_context.req_id not in self._requests.states
        return ReqContext() if is_over else req_context
