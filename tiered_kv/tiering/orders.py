"""Prefetch orders: blocks that a router wants in memory before a request asks for them.

The HTTP server's threads give orders in and read their counts. All else runs on the manager's thread, at each step's
end. The way of an order:

1. `give` puts it into the inbox; `act` takes it from there.
2. Its blocks are looked up, some in each step. A block in memory is held at once.
3. A block that a tier has takes a row only when its load is submitted: while no other load of that tier is in flight,
   and a small job at a time. So a request's load waits for one small job at most. `PrefetchBudget` says how many blocks
   may be loaded: few, while requests use few of them.
4. A loaded block is held until a request uses it, or the order ends. One that no request has used is evicted before
   all blocks that a request has used: so useless orders displace no more than what orders may hold. (But `density`
   evicts first what it expects back even less, and shares of tenants go before this order.)

An order of a warm start (`PrefetchOrder.chain`) fills memory: it takes free rows only, after all other orders, and
holds nothing.

What must stay true: requests go first. Orders hold a part of the promotion budget, and give the room back when a
request lacks it. They evict no block that a request has used since they were taken. All together are bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.chain import OldChain
from tiered_kv.cpu.recent_uses import RecentUses
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.series import Family, by_label
from tiered_kv.metrics.vocabulary import PREFETCHED, WARMED
from tiered_kv.system.step import STEP
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.order import Phase, PrefetchOrder
from tiered_kv.tiering.pace import EngineCost
from tiered_kv.tiering.prefetch_budget import PrefetchBudget
from tiered_kv.tiering.promotions import Promotions
from tiered_kv.tiering.requests import RequestState, RequestTable
from tiered_kv.tiering.search import Search

KEYS_A_TURN: Final = 16
"""Blocks of one order that are looked up before those of the next one."""
TURNS_A_STEP: Final = 4
"""How often that is done in a step."""
CHECK_S: Final = 0.05
"""How often the ends of orders are looked for, in seconds."""
JOB_S: Final = 0.01
"""How long a job of orders may take, by the tier's pace: a request's load may have to wait for it."""
JOB_BLOCKS: Final = (4, 64)
"""Blocks of such a job, at least and at most. Each job that has ended by the next step doubles the size of the next
one, and each that has not halves it: requests submit their loads at the ends of steps, too."""


class PrefetchOrders:
    """The orders of one manager.

    Args:
        blocks_max: Returns how many blocks orders may hold or load at a time.
        end_request: Ends a request of the manager.

    Attributes:
        wake: Called, on any thread, when the manager's thread has something to do.
        exist: Whether there is an order, or one to take. An attribute, since each step and each load reads it.
        has_work: Whether the next step may do more than to wait: for a job's end, for room, or for the end of orders.
        budget: The blocks that orders load, and the metric `prefetched_blocks_total`.
        warmed: The metric `warmed_blocks_total`.
    """

    def __init__(
        self,
        rows: PrimaryRows,
        promotions: Promotions,
        search: Search,
        requests: RequestTable,
        blocks_max: Callable[[], int],
        end_request: Callable[[RequestState], None],
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.exist = self.has_work = False
        self.warmed = dict.fromkeys(("loaded", "present", "absent", "refused"), 0)
        self._rows, self._promotions, self._search, self._requests = rows, promotions, search, requests
        self._blocks_max, self._end_request = blocks_max, end_request
        self.budget = PrefetchBudget(blocks_max)
        self._inbox: deque[PrefetchOrder | str] = deque()  # any thread appends: an order, or the name of one to end
        self._orders: dict[PrefetchOrder, RequestState] = {}
        self._by_name: dict[str, PrefetchOrder] = {}
        self._queued: dict[PrefetchOrder, None] = {}  # that are not looked up yet
        self._asking: deque[PrefetchOrder] = deque()  # with blocks to look up; each has a turn
        self._found: dict[GuardedTier, dict[PrefetchOrder, deque[OffloadKey]]] = {}
        """The blocks of each order that a tier has, and that wait to be loaded; none is empty."""
        self._filling: dict[PrefetchOrder, None] = {}  # orders that fill memory
        self._loading: dict[PrefetchOrder, None] = {}  # with blocks that are being loaded
        self._loading_blocks = 0  # of all orders
        self._jobs: dict[GuardedTier, tuple[int, int]] = {}  # each tier's last job: its size, and its step
        self._step = 0
        self._check_s = 0.0  # when the ends of orders are looked for
        self._held: dict[OffloadKey, list[PrefetchOrder]] = {}  # that hold each block, the oldest block first
        self._is_loading = False  # whether an order takes a row now: no other order gives way to it
        self._cost = EngineCost()  # infinite: a load is worth its wait, since nobody waits for it
        promotions.give_way = rows.give_way = self._give_way

    # Any thread.

    def give(self, order: PrefetchOrder) -> None:
        """Begin an order."""
        self._inbox.append(order)
        self.exist = self.has_work = True
        self.wake()

    def drop(self, name: str) -> None:
        """End an order: its blocks are held no more."""
        self._inbox.append(name)
        self.exist = self.has_work = True
        self.wake()

    def families(self) -> list[Family]:
        """Return the counts of blocks by their outcomes."""
        counted = {PREFETCHED: self.budget.outcomes, WARMED: self.warmed}
        return [by_label(each, {name: n for name, n in counts.items() if n}) for each, counts in counted.items()]

    # The manager's thread.

    def act(self, now_s: float) -> None:
        """Go on with all orders, at the end of a step."""
        STEP.begin()
        self._step += 1
        self._take()
        if now_s >= self._check_s:
            self._check_s = now_s + CHECK_S
            for order in [each for each in self._orders if each.until_s <= now_s]:
                self._end(order, is_in_vain=True)
        for order in list(self._loading):
            self._note_loads(order, self._orders[order])
        self._ask_some(now_s)
        has_room = self._load()
        for order in [each for each in self._filling if len(each.phases) == len(each.keys)]:
            self._end(order)
        # In this order: another thread appends to the inbox, and then sets both.
        self.exist = bool(self._orders)
        self.has_work = bool(self._asking or self._loading or (self._found and has_room))
        if self._inbox:
            self.exist = self.has_work = True

    def use(self, keys: Collection[OffloadKey]) -> None:
        """Note that a request loads blocks. The caller has pinned them."""
        for key in self._held.keys() & keys:
            self._release(key, Phase.USED)
            self.budget.use(key)

    def clear(self) -> None:
        """End all orders, before the cache is reset."""
        for order in list(self._orders):
            self._end(order)

    def _take(self) -> None:
        while self._inbox:
            given = self._inbox.popleft()
            if isinstance(given, str):
                if given in self._by_name:
                    self._end(self._by_name[given])
                continue
            state = self._requests.state_of(ReqContext(f"\0prefetch {given.name}"))
            state.cost, state.loads.order = self._cost, given
            if given.chain is not None:
                self._filling[given] = None
                self._asking.append(given)
            else:
                self._queued[given] = None
                self._rows.recent = self._rows.recent or RecentUses()
                given.uses_before = self._rows.recent.number
            given.asked.extend(given.keys)
            self._orders[given] = state
            self._by_name[given.name] = given

    def _end(self, order: PrefetchOrder, *, is_in_vain: bool = False) -> None:
        """End an order; `is_in_vain` if no request has used what it still holds, and nobody has ended it before."""
        state = self._orders.pop(order)
        del self._by_name[order.name]
        order.is_ended = True
        if order.chain is None:
            self._let_go(order, is_in_vain=is_in_vain)
        else:
            self._filling.pop(order, None)
            counts = order.counts()
            self.warmed["loaded"] += counts["in_memory"]
            self.warmed["present"] += counts["used"]
            self.warmed["absent"] += counts["absent"] + counts["coming"]
            self.warmed["refused"] += counts["refused"]
        self._loading_blocks -= len(order.loading)
        self._loading.pop(order, None)
        for key in order.loading.difference(*(each.loading for each in self._loading)):  # no order will hold the block
            self.budget.let_go(key, is_in_vain=is_in_vain)
        self._queued.pop(order, None)
        for waiting in self._found.values():
            waiting.pop(order, None)
        order.loading.clear()
        order.asked.clear()
        if self._requests.states.get(state.req_context.req_id) is state:
            self._end_request(state)
        if not self._orders:
            self._rows.recent = None
        order.on_ended()

    def _let_go(self, order: PrefetchOrder, *, is_in_vain: bool) -> None:
        """Hold no block for an order that ends."""
        for key in [key for key, phase in order.phases.items() if phase is Phase.IN_MEMORY]:
            holders = self._held[key]
            holders.remove(order)
            if not holders:
                del self._held[key]
                self.budget.let_go(key, is_in_vain=is_in_vain)

    def _release(self, key: OffloadKey, phase: Phase) -> None:
        """Hold a block no longer, for all orders."""
        for order in self._held.pop(key):
            order.phases[key] = phase
            self._promotions.release(self._orders[order], (key,))

    def _ask_some(self, now_s: float) -> None:
        # While requests use few of the loaded blocks, one order has a turn at a time; one that fills memory has none.
        while self._queued:
            waiting = (each for each in chain(self._asking, *self._found.values()) if each.chain is None)
            if self.budget.is_small and not self.budget.take_turn(now_s, is_free=not any(waiting)):
                break
            order = next(self._in_turn(self._queued))
            del self._queued[order]
            self._asking.append(order)
        for _ in range(TURNS_A_STEP):
            asking = self._asking.popleft() if self._asking else None
            if asking is not None and not asking.is_ended:
                self._ask(asking, self._orders[asking])
                if asking.asked:
                    self._asking.append(asking)

    def _ask(self, order: PrefetchOrder, state: RequestState) -> None:
        """Look up the next blocks of an order."""
        keys = [order.asked.popleft() for _ in range(min(KEYS_A_TURN, len(order.asked)))]
        present: dict[OffloadKey, int] = {}
        with self._search.ahead(state):
            for key in keys:
                row = self._rows.index.get(key)
                if row is not None and row >= 0:
                    present[key] = row
                    continue
                answer = self._search.below(key, row, state.req_context)
                if answer is False:
                    order.phases[key] = Phase.ABSENT
                elif key in state.loads.promoting:  # another request's promotion
                    self._begin_load(key, order)
                elif key not in order.found:
                    order.asked.append(key)  # a tier has not answered, or an engine writes the block
        for key, guarded in order.found.items():
            self._found.setdefault(guarded, {}).setdefault(order, deque()).append(key)
        order.found.clear()
        if present:
            self._keep(present, order, state)

    def _ask_again(self, order: PrefetchOrder, keys: Iterable[OffloadKey]) -> None:
        """Look up blocks of an order once more."""
        if not order.asked:
            self._asking.append(order)
        order.asked.extend(keys)

    def _begin_load(self, key: OffloadKey, order: PrefetchOrder) -> None:
        order.loading.add(key)
        self._loading[order] = None
        self._loading_blocks += 1

    def _keep(self, present: dict[OffloadKey, int], order: PrefetchOrder, state: RequestState) -> None:
        """Hold blocks that are in memory, in these rows, unless a request has used them since the order was taken."""
        recent = self._rows.recent
        if order.chain is not None or recent is None:
            order.phases.update(dict.fromkeys(present, Phase.USED))  # before they were loaded
            return
        used = set(present.values()).intersection(recent.since(order.uses_before) or ())
        for key, row in present.items():
            if row in used and key not in self._held:
                order.phases[key] = Phase.USED
                continue
            if self._room() > 0:
                self._promotions.keep(key, row, state)
            self._note_held(key, order, state)

    def _note_held(self, key: OffloadKey, order: PrefetchOrder, state: RequestState) -> None:
        is_held = key in state.loads.held
        if is_held:
            state.loads.held_until_s = order.until_s
            self._held.setdefault(key, []).append(order)
        order.phases[key] = Phase.IN_MEMORY if is_held else Phase.REFUSED

    def _note_loads(self, order: PrefetchOrder, state: RequestState) -> None:
        """Note which loads of an order have ended."""
        for key in [key for key in order.loading if key not in state.loads.promoting]:
            order.loading.discard(key)
            self._loading_blocks -= 1
            if key not in state.loads.held:  # another tier may have it: the one that failed is asked no more
                self.budget.fail(key)
                self._ask_again(order, (key,))
                continue
            if order.chain is not None:
                self._promotions.release(state, (key,))
                order.phases[key] = Phase.IN_MEMORY
                continue
            self._note_held(key, order, state)
            self.budget.arrive(key)
        if not order.loading:
            del self._loading[order]

    def _load(self) -> bool:
        """Begin a small load in each tier that has no other load in flight; return whether orders have room."""
        has_room = True
        spared: int | None = None
        """The rows that were used since this number are not evicted in this step."""
        chains: dict[PrefetchOrder, OldChain] = {}  # of this step's part only: an order may be long
        for guarded, waiting in list(self._found.items()):
            if guarded.is_out:  # since it has answered: another tier may have the blocks
                for each, keys in waiting.items():
                    self._ask_again(each, keys)
                del self._found[guarded]
                continue
            blocks = 0 if guarded.loads.will_grow else self._job_blocks(guarded)
            while waiting and blocks > 0:
                if self._room() <= 0 or self._promotions.is_full:
                    return False
                order = self._next_of(waiting)
                if order is None or guarded.load_room() <= 0:
                    has_room = False
                    break
                keys, has_free = waiting[order], self._rows.backend.get_num_free_blocks() > 0
                if order.chain is not None and not has_free and self._rows.backend.is_growing:
                    break
                key = keys.popleft()
                if not keys:
                    del waiting[order]
                if key in self._rows.index:  # a request has stored or promoted it meanwhile
                    self._ask_again(order, (key,))
                    continue
                if not has_free and order.chain is None and (spared is None or order.uses_before < spared):
                    spared = order.uses_before if self._rows.spare_since(order.uses_before) else None
                blocks -= 1
                state = self._orders[order]
                state.chain = order.chain or chains.setdefault(order, OldChain(1))
                may_begin = has_free or (order.chain is None and spared is not None)
                self._begin(key, guarded, order, state, may_begin=may_begin)
            if not waiting:
                del self._found[guarded]
        return has_room

    def _next_of(self, waiting: dict[PrefetchOrder, deque[OffloadKey]]) -> PrefetchOrder | None:
        """Return the order whose block is loaded next: one that fills memory comes last, and takes no budget."""
        last = next((each for each in self._filling if each in waiting), None)
        if self.budget.is_full:
            return last
        return next((each for each in self._in_turn(waiting) if each.chain is None), last)

    def _in_turn(self, orders: dict[PrefetchOrder, Any]) -> Iterator[PrefetchOrder]:  # Any: it reads only the orders
        """Return the oldest order first; where few blocks may be loaded, the newest: it has most of its time left."""
        return reversed(orders) if self.budget.is_small else iter(orders)

    def _begin(
        self, key: OffloadKey, guarded: GuardedTier, order: PrefetchOrder, state: RequestState, *, may_begin: bool
    ) -> None:
        if may_begin:
            self._is_loading = True
            self._promotions.begin(key, guarded, state)
            self._is_loading = False
        if key in state.loads.promoting:
            self._begin_load(key, order)
            if order.chain is None:
                self.budget.begin(key)
        else:
            order.phases[key] = Phase.REFUSED
            if order.chain is None:
                self.budget.refuse()

    def _job_blocks(self, guarded: GuardedTier) -> int:
        """Return the size of the next job of a tier that has no load in flight."""
        least, most = JOB_BLOCKS
        size, step = self._jobs.get(guarded, (least, self._step))
        if step < self._step:  # it has had a job since the size was found
            size = min(most, 2 * size) if step == self._step - 1 else max(least, size // 2)
        self._jobs[guarded] = size, self._step
        return max(least, min(size, guarded.pace.blocks_in(JOB_S, most))) if guarded.pace.is_known else size

    def _room(self) -> int:
        """Return how many more blocks the orders may hold or load."""
        return self._blocks_max() - len(self._held) - self._loading_blocks

    def _give_way(self, blocks: int) -> bool:
        """Let go of held blocks, the oldest first, because a request lacks room; return whether there were any."""
        if self._is_loading:
            return False
        keys = list(islice(self._held, blocks))
        for key in keys:
            self._release(key, Phase.REFUSED)
            self.budget.let_go(key, is_in_vain=True)
        return bool(keys)
