"""The manager of a stack, which engines, programs and a host's sessions call.

One thread calls, the scheduler's; a program's threads call under one lock. What must stay true: only `drain_jobs` and
`shutdown` wait, and after a reset no call finds a block from before the reset.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from tiered_kv.base import (
    OffloadingEvent,
    OffloadKey,
    ReqContext,
)
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.cpu.shared_rows import SharedRows
from tiered_kv.metrics.step_timer import timed
from tiered_kv.system.step import STEP
from tiered_kv.tiering.engine_calls import EngineCalls
from tiered_kv.tiering.interface import CalledManager
from tiered_kv.tiering.pace import EngineCost

_DRAIN_POLL_S = 0.0005


class TieringOffloadingManager(EngineCalls, CalledManager):
    """Cascades stores to secondary tiers, and promotes loads from them.

    Args:
        primary: The rows of the primary tier; `shutdown` closes them.
        secondary_tiers: The tiers below it, in search order. A tier without `is_nonblocking` runs on its own thread.
        settings: The limits and the name of each tier; by default the settings of its `tier_type`.
        hints: Names of the hints that are used.
        block_tokens: Tokens of a block; 0 if unknown.
        compute_block_s: Seconds in which the engine computes a block. Blocks that would arrive later are not promoted.
        history: Receives why requests missed blocks; optional. It has the names of all tiers. `shutdown` closes it.
        event_sink: Receives the events of all tiers at the end of each step; optional. `take_events` is then empty.
            `shutdown` closes it. Tiers have events if the primary tier `reports_events`.
        wear_clock: Clock of write budgets and of the policy; default `clock`. A simulation passes its requests' time.

    Attributes:
        cost: The engine's cost of computing.
        shown_cost: The cost that the gauges show, of one of several engines.
        notices: The last changes of state of all tiers.
    """

    # Calls of a program.

    def contains_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return self._many.contains_many(keys, req_context)

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        STEP.begin()
        return self._many.lookup_prefix(keys, req_context)

    def let_go(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = self._requests.get(req_context)
        if state is not None and state.loads.held:
            self._promotions.release(state, keys)

    def stores_nothing_of(self, req_context: ReqContext) -> bool:
        return self._requests.stores_nothing_of(req_context)

    def has_kept(self, req_context: ReqContext) -> bool:
        state = self._requests.get(req_context)
        return bool(self._tiers) and state is not None and state.stores.is_kept

    def is_outdated(self, req_context: ReqContext) -> bool:
        return self._requests.is_outdated(req_context)

    def spare_own(self, req_context: ReqContext) -> None:
        self._requests.state_of(req_context).chain.spares_own = True

    def reserve_stores(self, num_blocks: int) -> bool:
        return self._tiers.reserve_stores(num_blocks)

    def release_stores(self, num_blocks: int) -> None:
        self._tiers.release_stores(num_blocks)

    @property
    def epoch(self) -> int:
        return self.primary.epoch

    @property
    def has_tiers_below(self) -> bool:
        return bool(self._tiers)

    @property
    def jobs_in_flight(self) -> int:
        return self._tiers.jobs_in_flight

    # Calls for the sessions of a host.

    @timed
    def lease(self, rows: list[int], req_context: ReqContext) -> None:
        """Pin distinct ready blocks for a request's load. Unlike `prepare_load`, it does not end the prefetch."""
        STEP.begin()
        state = self._requests.state_of(req_context)
        self.primary.lease(rows, state.chain_in(req_context))
        key_of = self.primary.table.key
        self._note_load([key_of[row] for row in rows], state)

    @timed
    def end_leases(self, rows: Collection[int], req_context: ReqContext) -> None:
        """Release the pins of `lease`."""
        key_of = self.primary.table.key
        keys = [key_of[row] for row in rows] if self._cascade.counting_tiers else []
        self.primary.unpin(rows)
        if keys:
            self._cascade.offer_loaded(keys, req_context)

    def store_granted(self, keys: Sequence[OffloadKey], rows: Sequence[int], req_context: ReqContext) -> list[int]:
        """Store blocks that an engine has already written into rows of `primary.grant`; return the unused rows."""
        state = self._requests.state_of(req_context)
        stored: list[OffloadKey] = []
        if self._requests.is_outdated(req_context):
            unused = list(rows)
        elif state.hints.skips_store:
            self._requests.skipped_blocks += len(keys)
            unused = list(rows)
        else:
            stored, unused = self.primary.adopt(keys, rows, req_context.req_id, state.chain_in(req_context))
        if self._tiers and req_context.req_id:
            state.stores.note(keys)
            state.stores.pending += len(stored)
        self.complete_store(stored, req_context)
        return unused

    def use_cost(self, cost: EngineCost, req_context: ReqContext) -> None:
        """From now on decide a request's loads by `cost`, of its engine, which is one of several."""
        self._requests.state_of(req_context).cost = cost

    def is_ahead(self, req_context: ReqContext) -> bool:
        """Return whether the prefetch of a request goes on, or has left out blocks that would come too late."""
        state = self._requests.get(req_context)
        if state is None:
            return False
        return state in self._prefetches.running or bool(state.loads.promoting) or state.loads.is_cut

    def sources_of(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the tier of each block that was promoted for a request."""
        state = self._requests.get(req_context)
        return {} if state is None else state.loads.sources

    def loads_nothing(self, req_context: ReqContext) -> bool:
        """Return whether a request began before a reset, or has the hint `skip: load`."""
        return self._requests.loads_nothing(req_context)

    @property
    def has_saved_reset(self) -> bool:
        """Whether the last reset also holds after this process ends: the storage of each tier has recorded it."""
        return self._tiers.has_saved_reset

    def limit_promotions(self, rows: int) -> None:
        """Limit promotions, and blocks held for requests, to their share of `rows` rows: no other can be used yet."""
        self._promotions.blocks_max = self._promotions_max(rows)

    # Emptying and closing.

    def reset_cache(self) -> None:
        """Forget every block in every tier, and disable tiers that cannot reset: their blocks are not valid any more.

        Rows in flight become free when their transfers have ended. Requests that have begun store and load nothing
        until they end. A call without a request id belongs to no request: its caller must not store blocks from before
        the reset.
        """
        self._forget_primary()
        self.notices.add(PRIMARY_NAME, "cache reset")
        self._tiers.reset()
        self._account.publish_reset()
        self._search.refresh(self._clock())

    def outdate(self, req_context: ReqContext) -> None:
        self._requests.outdate(self._requests.state_of(req_context))

    def _forget_primary(self) -> None:
        self._account.resetting()
        self.orders.clear()
        self._promotions.reset()
        self._prefetches.clear()
        self._uses.clear()
        for state in list(self._requests.states.values()):
            state.forget_blocks()
            if state.is_finished:
                self._end_request(state)
            elif state.req_context.req_id:
                self._requests.outdate(state)
        self.primary.reset(is_reported=not self._has_event_sink)

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

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """As in `CacheManager`. If a job is still in flight at the end, the region stays mapped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cascade.stop()
        for state in list(self._requests.states.values()):
            if state.is_finished:
                self._end_request(state)
            else:
                self._promotions.leave(state)
        self._close_tiers(timeout_s)
        for state in list(self._requests.states.values()):
            self._account.request_ended(state.log, state.waited_s)
        self._requests.states.clear()
        self._search.stop()
        self._account.close()
        self.primary.close(unmap=not self.jobs_in_flight)

    def _close_tiers(self, timeout_s: float) -> None:
        self._drain(timeout_s)  # not `drain_jobs`: a long queue of the history would take seconds more
        self._uses.stop()  # a job that begins from now on is not reported any more
        self.removals.close()
        self._tiers.close(state.req_context for state in self._requests.states.values())
        self.poll()

    # For exporters.

    def take_events(self) -> list[OffloadingEvent]:
        return self._account.take_events()

    def estimates(self) -> dict[str, dict[str, float]]:
        """Return the gauges of the times that decide whether blocks are loaded, by tier. Any thread may call."""
        return {PRIMARY_NAME: self.shown_cost.snapshot(), **self._tiers.estimates()}

    def disabled_tiers(self) -> set[str]:
        """Return the names of the tiers that are not used any more. Any thread may call."""
        return self._tiers.disabled()

    def removed_tiers(self) -> dict[str, str]:
        """Return the stage of each tier that was taken out, or is not open yet, by name. Any thread may call."""
        return self.removals.stages()

    def tenant_limits(self) -> dict[str, TenantLimits]:
        """Return the limits of tenants in each tier that has some, by its name. Any thread may call."""
        own = {PRIMARY_NAME: self.primary.shares.limits} if isinstance(self.primary, SharedRows) else {}
        return {**own, **self._tiers.limits()}
