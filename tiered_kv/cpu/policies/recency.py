"""Policies by recency: an order of blocks by the request that used them last, and lru and arc over it.

`PrimaryRows` calls them, on the scheduler's thread. An order holds evictable blocks only, never a pinned one. Of one
request, the block at the end of the prefix is evicted first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies import CachePolicy
from tiered_kv.cpu.policies.ghosts import Ghosts
from tiered_kv.cpu.row_table import RowTable, unwatched

QUEUE_SPARE = 64
"""How many entries of a queue may be out of date, besides one for each chain. A stack has as many spare entries."""


class _Stack:
    """The rows of one chain; sorted by position only when a pop finds them out of order.

    A row that leaves keeps its entry, and gets another one when it comes back: to leave costs no search. An entry
    counts if `stack_of` names this stack for its row, and no later entry names the same row.
    """

    __slots__ = ("count", "is_sorted", "rows", "top")

    def __init__(self) -> None:
        self.rows: list[int] = unwatched([])
        self.count = 0  # rows whose entries count
        self.top = -1  # the largest position
        self.is_sorted = True

    def __len__(self) -> int:
        return len(self.rows)


_NO_STACK = _Stack()
"""Stands for the stack before the first row of an `add`."""


class ChainOrder:
    """Evictable rows: the least recently used chain first, and within a chain the tail first.

    In an LRU list of blocks, each use of a request would have to move all of its blocks, so that the tail goes before
    the head. Here the list contains *chains*, one for each request. A chain is a stack of the blocks that its request
    was the last to use. Eviction pops from the top of the least recently used chain: the tail of its prefix. So
    storing, using and evicting cost O(1) a block.

    `RequestChain.last_use` orders the chains. When a store or the last read of a block ends, the block becomes
    evictable, and the order of the chains stays.

    If a later request shares a request's head, and the earlier one continues without naming these blocks, its tail
    becomes more recent than its head. Engines name all blocks when they schedule a request, which restores the order.

    Owned by the manager's thread.

    Args:
        table: The state of the rows.
        stack_of: The stack of each row; None for a row that is in no stack. Several orders may share it.
    """

    def __init__(self, table: RowTable, stack_of: list[_Stack | None]) -> None:
        self._table = table
        self.stacks: dict[RequestChain, _Stack] = {}
        self._stack_of = stack_of
        # A heap by last use. An entry is out of date if its chain was used later, or has no blocks any more.
        self._queue: list[tuple[int, int, RequestChain]] = []
        self._numbers = itertools.count()  # decide between entries of one use: chains have no order
        self._held: dict[int, None] = {}  # set aside in this step
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, rows: Collection[int]) -> None:
        """Add rows that are not in the order."""
        chain_of, position_of, stack_of = self._table.chain, self._table.position, self._stack_of
        if len(stack_of) < len(chain_of):
            stack_of += [None] * (len(chain_of) - len(stack_of))
        chain: RequestChain | None = None
        stack, top = _NO_STACK, -1
        append = stack.rows.append
        for row in rows:
            if chain_of[row] is not chain:
                stack.top = top
                chain = chain_of[row]
                assert chain is not None
                stack = self.stacks.get(chain) or self._begin(chain)
                self._shrink(stack)
                append, top = stack.rows.append, stack.top
            append(row)
            stack_of[row] = stack
            stack.count += 1
            position = position_of[row]
            if position >= top:
                top = position
            else:
                stack.is_sorted = False
        stack.top = top
        self._size += len(rows)

    def discard(self, rows: Iterable[int]) -> list[int]:
        """Remove those of `rows` that are in the order, and return them."""
        stack_of, held = self._stack_of, self._held
        known = len(stack_of)
        removed = []
        left: _Stack | None = None  # the stack of the row before
        for row in rows:
            stack = stack_of[row] if row < known else None
            if stack is not None:
                stack_of[row] = None
                stack.count -= 1
                if not stack.count:
                    self._forget(row)
                if stack is not left:
                    self._shrink(left)
                    left = stack
            elif row in held:
                del held[row]
            else:
                continue
            removed.append(row)
        self._shrink(left)
        self._size -= len(removed)
        return removed

    def oldest(self) -> RequestChain | None:
        """Return the least recently used chain, or None if the order is empty."""
        queue = self._queue
        while queue:
            last_use, _, chain = queue[0]
            if chain not in self.stacks:
                heapq.heappop(queue)
            elif chain.last_use != last_use:
                heapq.heapreplace(queue, (chain.last_use, next(self._numbers), chain))
            else:
                return chain
        return None

    def depth(self, chain: RequestChain) -> int:
        """Return the position of a chain's deepest row; -1 if it has none here."""
        stack = self.stacks.get(chain)
        return -1 if stack is None else self._table.position[self._last(stack)]

    def pop(self, count: int, step: int, spare: RequestChain | None) -> list[int]:
        """Remove and return up to `count` rows in the order of eviction, none of the chain `spare`.

        Rows with this `step` are set aside until the step ends, so each is visited once a step at most. `spare` must
        be the most recently used chain.
        """
        popped: list[int] = []
        while len(popped) < count and (chain := self.oldest()) is not None and chain is not spare:
            popped += self.pop_from(chain, count - len(popped), step)
        return popped

    def pop_from(self, chain: RequestChain, count: int, step: int) -> list[int]:
        """Remove and return up to `count` rows of a chain that has some, the deepest first."""
        popped: list[int] = []
        stack, stack_of, step_of = self.stacks[chain], self._stack_of, self._table.step
        self._last(stack)
        pop, left = stack.rows.pop, stack.count
        while left and len(popped) < count:
            row = pop()
            if stack_of[row] is not stack:
                continue
            stack_of[row] = None
            left -= 1
            if step_of[row] == step:
                self._held[row] = None
            else:
                popped.append(row)
        stack.count = left
        if left:
            stack.top = self._table.position[self._last(stack)]
        else:
            del self.stacks[chain]
        self._size -= len(popped)
        return popped

    def end_step(self) -> None:
        """Put back the rows that were set aside."""
        if self._held:
            held, self._held = self._held, {}
            self._size -= len(held)
            self.add(held)

    def remains(self) -> list[Any]:  # Any: parts of this order
        """Return what the order consists of, for a caller that drops it in parts. The order is not used any more."""
        return [self._queue, self.stacks, self._stack_of]

    def _last(self, stack: _Stack) -> int:
        """Return the row at the top of a stack that has some; sort it if needed."""
        rows, stack_of = stack.rows, self._stack_of
        if not stack.is_sorted:
            self._tidy(stack)
            rows = stack.rows
        while stack_of[rows[-1]] is not stack:
            rows.pop()
        return rows[-1]

    def _tidy(self, stack: _Stack) -> None:
        """Drop the entries that do not count, and sort the others."""
        stack_of = self._stack_of
        rows = [row for row in dict.fromkeys(reversed(stack.rows)) if stack_of[row] is stack]
        rows.reverse()
        if not stack.is_sorted:
            rows.sort(key=self._table.position.__getitem__)
        stack.rows, stack.is_sorted = unwatched(rows), True

    def _shrink(self, stack: _Stack | None) -> None:
        """Drop the entries of a stack that do not count, if they are more than the others."""
        if stack is not None and len(stack.rows) > 2 * stack.count + QUEUE_SPARE:
            self._tidy(stack)

    def _forget(self, row: int) -> None:
        """Forget the chain of a row, which was its last one."""
        chain = self._table.chain[row]
        assert chain is not None
        del self.stacks[chain]

    def _begin(self, chain: RequestChain) -> _Stack:
        if len(self._queue) > 2 * len(self.stacks) + QUEUE_SPARE:
            self._queue = [(each.last_use, next(self._numbers), each) for each in self.stacks]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (chain.last_use, next(self._numbers), chain))
        stack = self.stacks[chain] = _Stack()
        return stack


class LRUPolicy(CachePolicy):
    """Evicts from the request that was used least recently, its tail first."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._order = ChainOrder(table, unwatched([]))

    def __len__(self) -> int:
        return len(self._order)

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()

    def add(self, rows: Collection[int]) -> None:
        self._order.add(rows)

    def remove(self, rows: Collection[int]) -> None:
        self._order.discard(rows)

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: parts of an order
        old, self._order = self._order, ChainOrder(self.table, unwatched([]))
        return old.remains()

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        order, chain_of = self._order, self.table.chain
        chain.refresh()
        if all(chain_of[row] is chain for row in rows):
            return
        evictable = order.discard(rows)
        chain.take(rows, self.table)
        order.add(evictable)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        if count > len(self._order):
            return None
        victims = self._order.pop(count, step, spare)
        if len(victims) < count:
            self._order.add(victims)
            return None
        return victims

    def end_step(self) -> None:
        self._order.end_step()


class ARCPolicy(CachePolicy):
    """Evicts blocks used once before blocks used again, in shares that adapt to the requests: adaptive replacement.

    After N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). Blocks used by one
    request (T1) and blocks used by several (T2) are in separate lists. The share of T1 adapts to the keys of evicted
    blocks (B1, B2) that return.

    One rule is added, because the tail of a prefix must be evicted before its head. The head may be in T2 while the
    tail is in T1. A tail is never used after its head, so T2 evicts only when its oldest request is older than the
    oldest of T1. For the same reason, a block that returns goes to T2 only if its request has no new block in T1: that
    block would be its head.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._is_frequent = bytearray()  # by row: whether its block was seen used again
        self._recent_ghosts, self._frequent_ghosts = Ghosts(), Ghosts()  # B1, B2
        self._recent_target = 0.0  # blocks that T1 should have
        self._begin()

    def _begin(self) -> None:
        stack_of: list[_Stack | None] = unwatched([])
        self._recent, self._frequent = ChainOrder(self.table, stack_of), ChainOrder(self.table, stack_of)  # T1, T2
        self._lists = self._recent, self._frequent

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()
        recent, frequent, key_of = self._recent_ghosts, self._frequent_ghosts, self.table.key
        self._is_frequent += bytes(len(self.table) - len(self._is_frequent))
        for row in rows:
            key, is_frequent = key_of[row], False
            if recent.discard(key):
                step = max(1.0, len(frequent) / (len(recent) + 1))
                self._recent_target = min(self._recent_target + step, float(self.num_blocks))
                is_frequent = not chain.note
            elif frequent.discard(key):
                step = max(1.0, len(recent) / (len(frequent) + 1))
                self._recent_target = max(self._recent_target - step, 0.0)
                is_frequent = not chain.note
            else:
                chain.note = True  # it has a new block in T1
            self._is_frequent[row] = is_frequent

    def add(self, rows: Collection[int]) -> None:
        for is_frequent, group in groupby(rows, key=self._is_frequent.__getitem__):
            self._lists[is_frequent].add(list(group))

    def remove(self, rows: Collection[int]) -> None:
        self._discard(rows)

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: parts of orders
        remains = [*self._recent.remains(), *self._frequent.remains()]
        self._begin()
        return remains

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()
        chain_of = self.table.chain
        moved = [row for row in rows if chain_of[row] is not chain]
        if not moved:
            return
        evictable = self._discard(rows)
        for row in moved:
            if chain_of[row] is not None:
                self._is_frequent[row] = True
        chain.take(rows, self.table)
        self.add(evictable)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        if count > len(self):
            return None
        victims: list[int] = []
        while len(victims) < count:
            chosen = self._choose(spare)
            if chosen is None:
                self.add(victims)
                return None
            order, chain, most = chosen
            victims += order.pop_from(chain, min(most, count - len(victims)), step)
        key_of, is_frequent = self.table.key, self._is_frequent
        for row in victims:
            (self._frequent_ghosts if is_frequent[row] else self._recent_ghosts).add(key_of[row])
        self._trim_ghosts()
        return victims

    def end_step(self) -> None:
        self._recent.end_step()
        self._frequent.end_step()

    def _discard(self, rows: Collection[int]) -> list[int]:
        is_frequent = self._is_frequent
        frequent = [row for row in rows if is_frequent[row]]
        if not frequent:
            return self._recent.discard(rows)
        if len(frequent) == len(rows):
            return self._frequent.discard(rows)
        removed = {
            *self._frequent.discard(frequent),
            *self._recent.discard(row for row in rows if not is_frequent[row]),
        }
        return [row for row in rows if row in removed]

    def _choose(self, spare: RequestChain | None) -> tuple[ChainOrder, RequestChain, int] | None:
        """Return the list that evicts next, its chain, and how many blocks to evict before the next choice; or None."""
        recent, frequent = (None if (chain := order.oldest()) is spare else chain for order in self._lists)
        excess, most = math.ceil(len(self._recent) - self._recent_target), self.num_blocks
        is_older = recent is not None and (frequent is None or recent.last_use <= frequent.last_use)
        if recent is not None and (is_older or excess > 0):
            (order, other), chain = self._lists, recent
            most = most if is_older else excess
        elif frequent is not None:
            (other, order), chain = self._lists, frequent
        else:
            return None
        depth = other.depth(chain)
        if depth < 0:
            return order, chain, most
        # The chain has blocks in both lists, and a head that was filled in later may be in T1: the deeper block goes.
        return (other if depth > order.depth(chain) else order), chain, 1

    def _trim_ghosts(self) -> None:
        # The paper's bounds: T1 and B1 together hold at most c keys, all four lists at most 2c.
        while len(self._recent_ghosts) and len(self._recent) + len(self._recent_ghosts) > self.num_blocks:
            self._recent_ghosts.pop()
        room = 2 * self.num_blocks - len(self) - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > room:
            self._frequent_ghosts.pop()
