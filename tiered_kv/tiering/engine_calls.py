"""The calls of an engine's scheduler in its steps: lookups, stores, loads, requests, and a step's end.

`TieringOffloadingManager` adds the calls outside of steps. All calls belong to one thread, the scheduler's. What must
stay true: no call waits or does I/O. A lookup answers True only for a block that is whole in the primary tier.
`PrimaryRows` owns rows, pins and evictions, and `RequestTable` owns the states of requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from tiered_kv.base import (
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from tiered_kv.config.settings import PRIMARY_NAME, TierSettings
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.hints import HINT_NAMES
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.metrics.notices import Notices
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import Family, by_label, numbers
from tiered_kv.metrics.step_timer import StepTimer, timed
from tiered_kv.metrics.vocabulary import ACCOUNT, PRIMARY
from tiered_kv.reasons import Reason
from tiered_kv.received import Received, received_of
from tiered_kv.system.step import PAUSES_MAX, STEP
from tiered_kv.tiering.account import EventSink, PrimaryAccount
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.cascade import Cascade
from tiered_kv.tiering.gauges import report_tier
from tiered_kv.tiering.interface import CacheManager
from tiered_kv.tiering.many_lookups import ManyLookups
from tiered_kv.tiering.orders import PrefetchOrders
from tiered_kv.tiering.pace import EngineCost
from tiered_kv.tiering.prefetch import Prefetches
from tiered_kv.tiering.promotions import Promotions
from tiered_kv.tiering.removal import Removals
from tiered_kv.tiering.requests import ManagerLimits, RequestState, RequestTable
from tiered_kv.tiering.search import Search
from tiered_kv.tiering.tiers import GuardedTiers
from tiered_kv.tiering.uses import Uses


class EngineCalls(CacheManager):
    """Cascades stores to secondary tiers, and promotes loads from them; see `TieringOffloadingManager`."""

    __slots__ = ("_lookup_below", "primary")  # hot path: each lookup reads them

    def __init__(
        self,
        primary: PrimaryRows,
        secondary_tiers: Sequence[SecondaryTierManager] = (),
        *,
        settings: Sequence[TierSettings] | None = None,
        limits: ManagerLimits | None = None,
        hints: Collection[str] = HINT_NAMES,
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
        self._clock, self._policy_clock = clock, wear_clock or clock
        self.cost = self.shown_cost = EngineCost(compute_block_s)
        self.notices = Notices()
        self._tiers = GuardedTiers.guarding(
            secondary_tiers,
            settings,
            primary,
            clock,
            cost=self.cost,
            notices=self.notices,
            history=history,
            wear_clock=wear_clock,
        )
        self._requests = RequestTable(self.limits, hints, clock, self.cost, self._answer_at_once)
        self._cascade = Cascade(primary, self._tiers, self._requests)
        self._uses = Uses(primary, self._tiers, clock)
        blocks_max = self._promotions_max(self.num_rows)
        self._promotions = Promotions(primary, self._cascade, blocks_max, self.limits.hold_s, clock)
        self._search = Search(
            primary, self._tiers, self._promotions, self._requests, self.limits.wait_max_s, clock, history
        )
        self._lookup_below = self._search.below
        self._many = ManyLookups(primary, self._tiers, self._requests, self._search, clock)
        self._prefetches = Prefetches(primary, self._promotions, self._search)
        parts = primary, self._promotions, self._search, self._requests
        self.orders = PrefetchOrders(*parts, self._orders_max, self._end_request)
        self.removals = Removals(self._tiers, self._requests.contexts, self.secondary_tiers)
        # The end of a step without work costs nothing: the parts that act at each step's end are chosen here.
        self._gathering_tiers = tuple(guarded for guarded in self._tiers if guarded.overrides("on_schedule_end"))
        self._has_event_sink, self._has_history = event_sink is not None, history is not None
        self._block_tokens = block_tokens
        self._account = PrimaryAccount(primary, self._tiers.accounts, history, event_sink, block_tokens)
        self.step_timer = StepTimer(clock)
        self.registry = Registry()
        self.registry.add(self._measure)
        self.registry.add(primary.measure)
        for guarded in self._tiers:
            report_tier(guarded, self.registry)
        self.registry.add(self._account.measure)
        self._is_closed = False

    # Lookups.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        STEP.pauses_left = PAUSES_MAX  # `STEP.begin` inlined: its call would take half as long as the rest
        primary = self.primary
        row = primary.index.get(key)
        if row is not None and row >= primary.ready_min:
            primary.step_of[row] = primary.step
            return True
        return self._lookup_below(key, row, req_context)

    def _answer_at_once(self, may_answer: bool) -> None:
        """Let lookups answer for ready blocks without a look at the request, or not: a request may load nothing."""
        self.primary.ready_min = 0 if may_answer else self.num_rows

    @timed
    def has_row(self, key: OffloadKey, req_context: ReqContext) -> bool:
        return key in self.primary

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        STEP.begin()
        return self._many.lookup_many(keys, req_context)

    def prefetch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._prefetches.begin(keys, self._requests.state_of(req_context))

    def end_prefetch(self, req_context: ReqContext) -> None:
        state = self._requests.get(req_context)
        if state is not None:
            self._prefetches.leave(state)

    def ask_known(self, keys: Callable[[], Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Do nothing: a stack knows its blocks without asking."""

    def expect(self, blocks: int, req_context: ReqContext, *, before: int = 0, is_whole: bool = False) -> None:
        self._search.expect(blocks, before, self._requests.state_of(req_context), is_whole=is_whole)

    def promoting(self, req_context: ReqContext) -> int:
        state = self._requests.get(req_context)
        return 0 if state is None else len(state.loads.promoting)

    def hit_tier(self, key: OffloadKey, req_context: ReqContext) -> str:
        state = self._requests.get(req_context)
        return PRIMARY_NAME if state is None else state.loads.sources.get(key, PRIMARY_NAME)

    def received(self, req_context: ReqContext) -> Received:
        state = self._requests.get(req_context)
        return Received() if state is None else received_of(state.loads.counts, state.waited_s, self._block_tokens)

    # The engine's transfers.

    @timed
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pin ready blocks, once each; the spec has a row for each of `keys`.

        Raises:
            ValueError: A key is not ready, or the request began before a reset; nothing was pinned.
        """
        STEP.begin()
        if keys and self._requests.is_outdated(req_context):
            raise ValueError(f"request {req_context.req_id!r} began before a reset of the cache, and loads nothing")
        found = self.primary.all_ready(keys)
        state = self._requests.state_of(req_context)
        distinct = found if len(set(found)) == len(found) else list(dict.fromkeys(found))
        self.primary.begin_loads(distinct, state.chain_in(req_context))
        self._note_load(keys, state)
        self._prefetches.leave(state)
        return CPULoadStoreSpec(found)

    @timed
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary.end_loads(keys)
        if self._cascade.counting_tiers:
            self._cascade.offer_loaded(keys, req_context)

    def _note_load(self, keys: Collection[OffloadKey], state: RequestState) -> None:
        log = self._requests.log_of(state) if self._has_history else None
        self._account.loaded(keys, log, state.loads.sources, state.loads.counts)
        if state.loads.held:
            self._promotions.release(state, keys)
        if self.orders.exist:
            self.orders.use(keys)
        state.stores.note(keys)
        self._uses.note(keys)

    @timed
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        STEP.begin()
        requests, primary = self._requests, self.primary
        state = requests.state_of(req_context)
        if requests.is_outdated(req_context):
            state.stores.is_kept = False
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])  # an engine would try again in each step after None
        chain = state.chain_in(req_context)
        stored, has_present = primary.find_absent(keys)
        if state.hints.skips_store:
            requests.skipped_blocks += len(stored)
            stored = []
        evicted: list[OffloadKey] = []
        rows = primary.allocate(stored, req_context.req_id, chain, evicted)
        if self._tiers and req_context.req_id:
            state.stores.note(keys)
            if rows is not None:
                state.stores.pending += len(stored)
                state.stores.is_kept &= len(stored) == len(keys)  # tiers may have skipped present blocks
        if rows is None:
            return None
        if has_present:
            primary.touch(keys, chain)
        else:
            chain.extend(rows, primary.table)
        if len(stored) < len(keys):
            self._uses.note(keys)
        return PrepareStoreOutput(stored, CPULoadStoreSpec(rows), evicted)

    @timed
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written = self.primary.written_by(req_context.req_id, keys)
        state = self._requests.get(req_context)
        request_level = state.stores.request_level if state is not None else ()
        if not success:
            self.primary.abandon(written)
        elif written:
            key_of = self.primary.table.key
            stored = [key_of[row] for row in written]
            self._account.stored(stored)
            self._uses.count_stored(len(stored))
            tiers = [tier for tier in self._tiers if tier not in request_level] if request_level else self._tiers
            is_kept = self._cascade.commit(written, stored, tiers, req_context)
            if state is not None and not is_kept:
                state.stores.is_kept = False
        if state is not None:
            state.stores.pending -= len(written)
            if state.is_finished and state.stores.pending <= 0 and not state.stores.unready:
                self._end_request(state)

    @timed
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = self._requests.state_of(req_context)
        self.primary.touch(keys, state.chain_in(req_context))
        state.stores.note(keys)
        self._uses.note(keys)

    # Requests and steps.

    @timed
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._requests.is_outdated(req_context):
            self.on_request_finished(req_context)  # the id is used again
        self.primary.begin_request(self._policy_clock())
        known = self._requests.get(req_context)
        stores_pending = 0
        if known is not None and known.is_finished:  # the id is reused while the last stores are in flight
            stores_pending = known.stores.pending  # only the id says to which request a store belongs
            self._end_request(known)
        state = self._requests.state_of(req_context)
        if self._requests.pushed_out:
            self._end_finished(self._clock())
        if not req_context.req_id:
            return RequestOffloadingContext()
        self._requests.read_hints(state, req_context)
        state.stores.pending += stores_pending
        state.stores.request_level = tuple(guarded for guarded in self._tiers if guarded.wants_all_of(req_context))
        if state.hints.skips_store:
            state.stores.request_level = ()
        policy = OffloadPolicy.REQUEST_LEVEL if state.stores.request_level else OffloadPolicy.BLOCK_LEVEL
        return RequestOffloadingContext(policy)

    @timed
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.renew(req_context)
        state = self._requests.get(req_context) if req_context.req_id else None
        if state is None:
            return
        if state.stores.request_level:  # wait for stores and promotions of other requests too
            state.stores.unready = self.primary.written_for_others(state.stores.keys, req_context.req_id)
        if state.stores.pending > 0 or state.stores.unready:
            self._requests.finish(state)
            self._leave(state)
        else:
            self._end_request(state)

    def on_schedule_end(self) -> None:
        began_s = self._clock()
        if self._prefetches.running:
            self._prefetches.ask()
        self._submit()
        if self.removals.exist:
            self.removals.act()  # before `_collect`, after which no lookup reaches a tier that was taken out
        self._collect()
        if self.orders.exist:  # after the step's requests, and the ends of jobs
            self.orders.act(began_s)
            self._promotions.submit()
        self.primary.end_step()
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
        if self._requests.finished or "" in self._requests.states or self._requests.pushed_out:
            self._end_finished(now_s)
        if now_s >= self._uses.due_s:
            self._uses.act(now_s)
        self._search.refresh(now_s)

    def _end_finished(self, now_s: float) -> None:
        """End the finished requests after their last stores, or when their time is over."""
        for state in [state for state in self._requests.finished if state.stores.unready]:
            primary = self.primary
            written = (key for key in state.stores.unready if key in primary and primary.row_of(key) is None)
            state.stores.unready = list(written)
            if state.stores.pending <= 0 and not state.stores.unready:
                self._end_request(state)
        for state in self._requests.take_over(now_s):
            self._end_request(state)

    def _end_request(self, state: RequestState) -> None:
        """Offer all blocks of a request to the tiers that wait for its end, then forget the request."""
        self._cascade.offer_ended(state)
        self._account.request_ended(state.log, state.waited_s)
        self._leave(state)
        self._requests.end(state)
        for guarded in self._tiers:
            guarded.call("on_request_finished", state.req_context)

    def _leave(self, state: RequestState) -> None:
        """End everything that a request waits for: lookups, promotions, room and its prefetch."""
        self._search.forget(state)
        self._promotions.leave(state)
        if state.loads.waits_for_room:
            self._search.room.leave(state)
        self._prefetches.leave(state)

    def _measure(self) -> Iterator[tuple[str, list[Family]]]:
        """Yield the counts of the primary tier, and of requests. Any thread may call."""
        counts = {
            **self.primary.snapshot(),
            **self._requests.snapshot(),
            **self.shown_cost.snapshot(),
            "promotion_blocks": self._promotions.blocks_taken,
            "prefetch_budget_bytes": self.orders.budget.blocks_max * self.primary.backend.region.block_bytes,
            "released_holds_total": self._promotions.released_holds,
            "huge_page_bytes": self.primary.backend.region.huge_bytes,
        }
        skipped = {Reason.BY_REQUEST.value: count} if (count := self._requests.skipped_blocks) else {}
        yield (
            PRIMARY_NAME,
            [
                *numbers(PRIMARY, counts),
                *self.orders.families(),
                by_label(ACCOUNT["skipped_blocks_total"], skipped),
                Family(PRIMARY["step_seconds"], {(): self.step_timer.seconds.snapshot()}),
            ],
        )

    @property
    def num_rows(self) -> int:
        return self.primary.backend.num_blocks

    def _promotions_max(self, rows: int) -> int:
        """Return how many blocks promotions may take while `rows` rows can be used: by default half of the rows."""
        share = max(rows // 2, 1)
        most = self.limits.promotion_blocks_max or share
        return most if rows == self.num_rows else min(most, share)

    def _orders_max(self) -> int:
        """Return how many blocks prefetch orders may hold or load: a quarter of the promotions' by default."""
        most = self._promotions.blocks_max
        return min(most, self.limits.prefetch_blocks_max or max(most // 4, 1))

    def _submit(self) -> None:
        """Submit the step's promotions, and end the step in the tiers."""
        if self._promotions.batches:
            self._promotions.submit()
        for guarded in self._gathering_tiers:
            guarded.call("on_schedule_end")
