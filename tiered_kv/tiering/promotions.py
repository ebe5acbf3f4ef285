"""Promotions: loads of blocks from the secondary tiers into the primary tier, and the holds of loaded blocks.

`Search` begins them, and the manager submits them at the end of each step, both on the manager's thread. A row that is
being loaded belongs to one promotion. A block is ready only once its tier has reported a load that succeeded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.cpu.writers import PROMOTION
from tiered_kv.reasons import Learning, Reason, TooSlow
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.cascade import Cascade
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob
from tiered_kv.tiering.pace import EngineCost, computed_blocks
from tiered_kv.tiering.requests import RequestState


@dataclass(slots=True, eq=False)
class Promotion:
    """A block, in state writing, that is being loaded from a tier for the requests that wait for it."""

    key: OffloadKey
    row: int
    guarded: GuardedTier
    waiters: list[RequestState]
    cost: EngineCost
    """Cost of the engine that the block is loaded for; requests of other engines may wait too."""
    is_ahead: bool
    """Begun by a prefetch: the request has not asked yet, and may ask for a longer part of its prefix."""
    is_try: bool = False
    """Slower than computing the block, and loaded only to measure the tier: no request waits for it."""


class Promotions:
    """Blocks that are being promoted, and promoted blocks that are held for requests. Owned by the manager's thread.

    A promoted block is pinned for each waiting request (a *hold*) until the request loads it or ends, or until the hold
    expires. Without holds a full primary tier could evict the block before its use, and the request would promote it
    again, for ever. Promoted blocks are offered to the cascade: tiers above their source may want them.
    """

    def __init__(
        self,
        rows: PrimaryRows,
        cascade: Cascade,
        blocks_max: int,
        hold_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._cascade = cascade
        self.blocks_max = blocks_max
        """Limit of the blocks that are being promoted or are held."""
        self.released_holds = 0
        self.give_way: Callable[[int], bool] | None = None
        """Makes room for so many blocks of requests, and returns whether it has made any."""
        self._hold_s = hold_s
        self._clock = clock
        self._table: dict[OffloadKey, Promotion] = {}  # all that run, or wait for `submit`
        self.batches: dict[tuple[GuardedTier, RequestState], list[Promotion]] = {}  # begun, and not submitted
        self.holders: dict[RequestState, None] = {}  # requests with holds
        self._held: dict[int, int] = {}  # row to its number of holds

    @property
    def blocks_taken(self) -> int:
        """Blocks that count against `blocks_max`."""
        return len(self._table) + len(self._held)

    @property
    def is_full(self) -> bool:
        return self.blocks_taken >= self.blocks_max

    def begin(self, key: OffloadKey, guarded: GuardedTier, state: RequestState) -> bool:
        """Take a primary block for `key`, if there is room; `submit` loads it from `guarded`.

        Returns:
            Whether the request should wait: the block is being promoted, or room will become free.
        """
        # A request with promotions of its own does not wait for room: two such requests could wait for each other.
        # Hot path: runs for each block that is promoted.
        may_wait = not (state.loads.promoting or state.loads.held)
        if len(self._table) + len(self._held) >= self.blocks_max and not (self.give_way and self.give_way(1)):
            return may_wait
        if guarded.load_room() <= 0:
            return guarded.loads.will_grow
        rows = self._rows
        if rows.is_orphaned(key):
            return False
        chain = state.chain_in(state.req_context)
        allocated = rows.allocate([key], PROMOTION, chain, [], source=guarded.number)
        if allocated is None:
            return may_wait
        chain.extend(allocated, rows.table)
        promotion = Promotion(key, allocated[0], guarded, [state], state.cost, not state.lookups.is_asking)
        self._table[key] = promotion
        self.batches.setdefault((guarded, state), []).append(promotion)
        guarded.loads.reserved_blocks += 1
        state.loads.promoting[key] = None
        return True

    def join(self, key: OffloadKey, state: RequestState) -> bool:
        """Let a request wait for a running promotion; return False if it should not wait."""
        promotion = self._table.get(key)
        if promotion is None or promotion.guarded in state.lookups.failed.get(key, ()):
            return False
        if promotion.cost is not state.cost and state.computes_sooner_than(promotion.guarded):
            return False
        if key not in state.loads.promoting:
            promotion.waiters.append(state)
            state.loads.promoting[key] = None
            if promotion.is_try:
                promotion.guarded.note_too_slow(1, TooSlow.LATE)
                self._fail(promotion, Reason.TOO_SLOW)
        return not promotion.is_try

    def sort(self, keys: Iterable[OffloadKey], state: RequestState) -> None:
        """Order the keys that are being promoted for a request: `keys` come last, in this order."""
        promoting = state.loads.promoting
        for key in [key for key in keys if key in promoting]:
            promoting[key] = promoting.pop(key)

    def keep(self, key: OffloadKey, row: int, state: RequestState) -> None:
        """Hold a ready block for a request, as if it had been promoted for it, if there is room."""
        if key not in state.loads.held and self.blocks_taken < self.blocks_max:
            self._rows.pin([row])
            self._hold(key, row, [state], self._clock() + self._hold_s)

    def submit(self) -> None:
        """Submit the loads begun since the last call: one job for each tier and request."""
        backlogs_s: dict[int, float] = {}
        while self.batches:  # a block that is too slow for one engine may be worth another's wait
            batches, self.batches = self.batches, {}
            self._submit(batches, backlogs_s, self._clock())

    def _submit(
        self,
        batches: dict[tuple[GuardedTier, RequestState], list[Promotion]],
        backlogs_s: dict[int, float],
        now_s: float,
    ) -> None:
        for (guarded, state), promotions in batches.items():
            cost = state.cost
            backlog_s = backlogs_s.setdefault(id(cost), cost.backlog_s)
            guarded.loads.reserved_blocks -= len(promotions)
            table, rows = self._rows.table, [promotion.row for promotion in promotions]
            chain = table.chain[rows[0]]
            if chain is not None:
                rows = chain.in_order(rows, table)  # the prefix's order, as in stores: tiers that evict by use need it
            keys = [table.key[row] for row in rows]
            # A half-open breaker admits one job, which may be another one of this step.
            refusal = guarded.refusal()
            if not refusal and cost.is_known:
                worth = self._worth(keys, guarded, state, backlog_s)
                if worth < len(keys):
                    before = (state.lookups.blocks_before or 0) + worth
                    backlogs_s[id(cost)] += cost.of(computed_blocks(keys[worth:]), before)
                    if len({id(waiter.cost) for each in promotions for waiter in each.waiters}) > 1:
                        keys[worth:] = self._hand_on(keys[worth:], cost)
                        promotions = [self._table[key] for key in keys]
                        if not keys:
                            continue
                    if worth or not self._is_tried(promotions, guarded, now_s):
                        self._refuse(keys[worth:], guarded, Reason.TOO_SLOW, TooSlow.CUT if worth else TooSlow.LATE)
                        del keys[worth:]
            if len(keys) < len(rows):
                rows = [self._table[key].row for key in keys]
            if refusal or (keys and not guarded.submit(keys, rows, state.req_context, self, is_promotion=True)):
                self._refuse(keys, guarded, refusal or Reason.EXCEPTION)
            elif keys and cost.is_known and (promotions[0].is_try or not guarded.pace.is_known):
                guarded.account.learning(Learning.TRY if promotions[0].is_try else Learning.FIRST)

    def _refuse(
        self, keys: Sequence[OffloadKey], guarded: GuardedTier, reason: Reason, slow_reason: TooSlow | None = None
    ) -> None:
        """Free the rows of blocks that are not loaded; `slow_reason` says why the blocks are too slow."""
        if slow_reason is not None:
            promotions = (self._table[key] for key in keys)
            if asked_for := sum(not promotion.is_ahead for promotion in promotions):
                guarded.note_too_slow(asked_for, slow_reason)
        rows = [self._table[key].row for key in keys]
        for key, row in zip(keys, rows, strict=True):
            self._drop(key, row, reason)
        self._rows.abandon(rows)

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Make the loaded blocks of a job ready, and free the rows of blocks that were not loaded."""
        if job.is_expired:
            self._rows.release(job.rows)
            return
        ok = job.loaded_keys(result)
        ready, stored, until_s = list[int](), list[OffloadKey](), self._clock() + self._hold_s
        waiting = list[int]()
        for key, row in self._blocks_of(job):
            promotion = self._table.get(key)
            if key in ok and promotion is not None and promotion.row == row:  # else it was reset in the meantime
                waiting.append(len(promotion.waiters))
                self._arrive(promotion, until_s)
                ready.append(row)
                stored.append(key)
            else:
                self._drop(key, row, result.cause)
                self._rows.abandon([row])
        for pins in set(waiting):  # most often all blocks have as many waiting requests
            places = [place for place, each in enumerate(waiting) if each == pins]
            rows, keys = [ready[place] for place in places], [stored[place] for place in places]
            self._rows.commit(rows, keys, pins=pins)
        self._rows.note_stored(stored)
        if ready:
            self._cascade.offer_promoted(ready, job.metadata.req_context)

    def expired(self, job: SubmittedJob) -> None:
        """Make the keys of an expired load misses. The blocks stay with the job until the tier reports it."""
        for key, row in self._blocks_of(job):
            self._drop(key, row, Reason.EXPIRED)
            self._rows.forget(row)

    def release(self, state: RequestState, keys: Iterable[OffloadKey] | None = None) -> None:
        """End holds of a request: on `keys`, which it loads, or by default on all blocks."""
        held = state.loads.held
        if keys is None:
            rows = list(held.values())
            held.clear()
        else:
            rows = [held.pop(key) for key in keys if key in held]
            if rows:  # the request has received blocks that it waited for
                state.lookups.end_wait()
        if not held:
            self.holders.pop(state, None)
        for row in rows:
            holders = self._held.pop(row) - 1
            if holders:
                self._held[row] = holders
        if rows:
            self._rows.unpin(rows)

    def release_overdue(self, now_s: float) -> None:
        """End expired holds."""
        before = len(self._held)
        for state in [state for state in self.holders if state.loads.held_until_s <= now_s]:
            self.release(state)
        self.released_holds += before - len(self._held)

    def leave(self, state: RequestState) -> None:
        """Forget a request that ends. Its promotions continue, without holds for it.

        A promotion that is not submitted yet goes to another waiting request, or ends here.
        """
        for key in state.loads.promoting:
            promotion = self._table.get(key)
            if promotion is not None:
                promotion.waiters.remove(state)
        state.loads.promoting.clear()
        for guarded in [guarded for guarded, each in self.batches if each is state]:
            for promotion in self.batches.pop((guarded, state)):
                if promotion.waiters:
                    self.batches.setdefault((guarded, promotion.waiters[0]), []).append(promotion)
                else:
                    guarded.loads.reserved_blocks -= 1
                    del self._table[promotion.key]
                    self._rows.abandon([promotion.row])
        self.release(state)

    def reset(self) -> None:
        """Forget all promotions. Blocks of jobs in flight become free when the jobs are reported."""
        for state in list(self.holders):
            self.release(state)
        for promotion in self._table.values():
            for state in promotion.waiters:
                state.loads.promoting.clear()
        self._table.clear()
        batches, self.batches = self.batches, {}
        for (guarded, _), promotions in batches.items():
            guarded.loads.reserved_blocks -= len(promotions)
            self._rows.abandon([promotion.row for promotion in promotions])

    def _worth(self, keys: Sequence[OffloadKey], guarded: GuardedTier, state: RequestState, backlog_s: float) -> int:
        """Return how many blocks of a batch are worth loading: they arrive before the engine would have computed them.

        Without the batch, the engine computes all blocks from the batch's first one on. Blocks of the tier's earlier
        loads count too: the request waits for them in any case.
        """
        if guarded.loads.blocks > guarded.loads.expired_blocks and not guarded.pace.is_known:
            return 0  # one load at a time
        batch = set(keys)
        behind = itertools.dropwhile(lambda key: key not in batch, state.loads.promoting)
        of_tier = [key for key in state.loads.promoting if self._table[key].guarded is guarded]
        saved = dict.fromkeys([*of_tier, *behind]) or dict.fromkeys(keys)
        computed, before = computed_blocks(saved), state.lookups.blocks_before or 0
        # A part of the batch is of no use if other promotions follow it, or if its groups depend on each other.
        is_whole = state.lookups.is_whole or computed != len(set(of_tier) | batch)
        rest = computed - len(keys)
        return guarded.pace.worth(
            len(keys),
            guarded.blocks_before_load(len(keys)),
            lambda part: state.cost.saved_by(rest + part, before),
            backlog_s,
            is_whole=is_whole,
            cost=state.cost,
        )

    def _hand_on(self, keys: Sequence[OffloadKey], cost: EngineCost) -> list[OffloadKey]:
        """Hand blocks that are too slow for one engine to requests of other engines; return blocks without any."""
        left = []
        for key in keys:
            promotion = self._table[key]
            others = [state for state in promotion.waiters if state.cost is not cost]
            if not others:
                left.append(key)
                continue
            promotion.waiters = [state for state in promotion.waiters if state.cost is cost]
            self._fail(promotion, Reason.TOO_SLOW)
            promotion.waiters, promotion.cost = others, others[0].cost
            self.batches.setdefault((promotion.guarded, others[0]), []).append(promotion)
            promotion.guarded.loads.reserved_blocks += 1
        return left

    def _is_tried(self, promotions: list[Promotion], guarded: GuardedTier, now_s: float) -> bool:
        """Return whether a batch that is too slow is loaded as a try, which no request waits for; count it then."""
        if any(promotion.is_ahead for promotion in promotions) or not guarded.pace.tries(now_s):
            return False
        guarded.note_too_slow(len(promotions), TooSlow.TRY)
        for promotion in promotions:
            promotion.is_try = True
            self._fail(promotion, Reason.TOO_SLOW)
        return True

    @staticmethod
    def _blocks_of(job: SubmittedJob) -> list[tuple[OffloadKey, int]]:
        """Return the keys and rows of a job."""
        return list(zip(job.metadata.keys, job.rows, strict=True))

    def _arrive(self, promotion: Promotion, until_s: float) -> None:
        """Hold a loaded block for the requests that wait; the caller makes it ready, pinned for each of them."""
        key, waiters = promotion.key, promotion.waiters
        del self._table[key]
        for state in waiters:
            state.loads.promoting.pop(key, None)
            state.loads.sources[key] = promotion.guarded.name
        self._hold(key, promotion.row, waiters, until_s)

    def _hold(self, key: OffloadKey, row: int, states: Sequence[RequestState], until_s: float) -> None:
        """Hold a block for requests. The caller pins it once for each of them."""
        for state in states:
            state.loads.held[key] = row
            state.loads.held_until_s = until_s
            self.holders[state] = None
            self._held[row] = self._held.get(row, 0) + 1

    def _drop(self, key: OffloadKey, row: int, reason: Reason) -> None:
        """End the promotion of a block after a failed load, unless it was reset meanwhile."""
        promotion = self._table.get(key)
        if promotion is not None and promotion.row == row:
            del self._table[key]
            self._fail(promotion, reason)

    def _fail(self, promotion: Promotion, reason: Reason) -> None:
        """Let no request wait for a block any more, nor ask its tier for it again."""
        key, is_undecided = promotion.key, promotion.is_ahead and reason is Reason.TOO_SLOW
        for state in promotion.waiters:
            state.loads.promoting.pop(key, None)
            if is_undecided:
                state.loads.is_cut = True
            elif reason is not Reason.BREAKER or not state.loads.waits_for_room:  # else the probe's end decides
                state.leave_tier(key, promotion.guarded, reason)
        promotion.waiters.clear()
