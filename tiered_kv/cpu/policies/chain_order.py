"""An order of rows by the request that used their blocks last, from whose prefix the tail goes first.

The policies by recency (`recency.py`) have one or two, on the scheduler's thread. An order holds rows of evictable
blocks only, never a pinned one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Any

from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.row_table import RowTable, unwatched

QUEUE_SPARE = 64
"""How many entries of a queue may be out of date, besides one for each chain. A stack has as many spare entries."""


class Stack:
    """The rows of one chain; sorted by position only when a pop finds them out of order.

    A row that leaves from the middle keeps its entry, and gets another one when it comes back: to leave costs no
    search. An entry counts if its row is in the order (see `ChainOrder`), and no later entry names the same row.
    """

    __slots__ = ("count", "is_sorted", "rows", "top")

    def __init__(self) -> None:
        self.rows: list[int] = unwatched([])
        self.count = 0  # rows whose entries count
        self.top = -1  # the largest position, or more
        self.is_sorted = True

    def __len__(self) -> int:
        return len(self.rows)


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

    Which rows are in the order needs no note for each row: those with the `ref_cnt` 0, each in its chain's stack. So a
    row is added after its `ref_cnt` has become 0, and removed before it changes, or before its chain does.

    Owned by the manager's thread.

    Args:
        table: The state of the rows.
        is_frequent: If two orders share the rows: a flag for each row, which says in which order it is.
        flag: The flag of the rows of this order.
    """

    def __init__(self, table: RowTable, is_frequent: list[bool] | None = None, flag: bool = False) -> None:
        self._table = table
        self._is_frequent, self._flag = is_frequent, flag
        self.stacks: dict[RequestChain, Stack] = {}
        # A heap by last use. An entry is out of date if its chain was used later, or has no blocks any more.
        self._queue: list[tuple[int, int, RequestChain]] = []
        self._numbers = itertools.count()  # decide between entries of one use: chains have no order
        self._held: dict[int, None] = {}  # set aside in this step
        self._popped: set[int] = set()  # since the last `end_pop`, of stacks with entries that do not count
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, rows: Collection[int]) -> None:
        """Add rows that are not in the order."""
        self._size += len(rows)
        for chain, of_chain in self._by_chain(rows):
            self._push(chain, of_chain)

    def discard(self, rows: Collection[int]) -> None:
        """Remove rows that are in the order."""
        self._size -= len(rows)
        if self._held:
            held = [row for row in rows if row in self._held]
            rows = [row for row in rows if row not in self._held]
            for row in held:
                del self._held[row]
        for chain, of_chain in self._by_chain(rows):
            self._take(chain, of_chain)

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
        return -1 if stack is None else self._table.position[self._last(stack, chain)]

    def pop(self, count: int, step: int, spare: RequestChain | None) -> list[int] | None:
        """Remove and return `count` rows in the order of eviction, none of the chain `spare`; None for too few.

        Rows with this `step` are set aside until the step ends, so each is visited once a step at most. `spare` must
        be the most recently used chain.
        """
        popped: list[int] = []
        while len(popped) < count and (chain := self.oldest()) is not None and chain is not spare:
            popped += self.pop_from(chain, count - len(popped), step)
        self.end_pop()
        if len(popped) < count:
            self.add(popped)
            return None
        return popped

    def pop_from(self, chain: RequestChain, count: int, step: int) -> list[int]:
        """Remove and return up to `count` rows of a chain that has some, the deepest first; `end_pop` follows."""
        stack, step_of, held = self.stacks[chain], self._table.step, self._held
        if not stack.is_sorted:
            self._tidy(stack, chain)
        popped: list[int] = []
        if len(stack.rows) > stack.count:
            self._pop_counting(stack, chain, count, step, popped)
        rows = stack.rows
        while len(rows) == stack.count and rows and len(popped) < count:
            part = rows[len(popped) - count :]
            del rows[len(popped) - count :]
            stack.count = len(rows)
            part.reverse()
            for row in part:
                if step_of[row] == step:
                    held.update(dict.fromkeys(row for row in part if step_of[row] == step))
                    part = [row for row in part if row not in held]
                    break
            popped += part
        if stack.count:
            stack.top = self._table.position[self._last(stack, chain)]
        else:
            del self.stacks[chain]
        self._size -= len(popped)
        return popped

    def end_pop(self) -> None:
        """Note that the rows that were popped are being freed, or added again."""
        if self._popped:
            self._popped.clear()

    def end_step(self) -> None:
        """Put back the rows that were set aside."""
        if self._held:
            held, self._held = self._held, {}
            self._size -= len(held)
            self.add(held)

    def remains(self) -> list[Any]:  # Any: parts of this order
        """Return what the order consists of, for a caller that drops it in parts. The order is not used any more."""
        return [self._queue, self.stacks]

    def _by_chain(self, rows: Collection[int]) -> Iterable[tuple[RequestChain, list[int]]]:
        """Return the rows of each chain, in their order; most often all are of one chain."""
        chain_of = self._table.chain
        chain: RequestChain | None = None
        for row in rows:
            if chain_of[row] is not chain:
                if chain is not None:
                    return [(each, list(part)) for each, part in groupby(rows, key=chain_of.__getitem__)]
                chain = chain_of[row]
        return () if chain is None else ((chain, list(rows)),)

    def _counts(self, row: int, chain: RequestChain) -> bool:
        """Return whether a row is in the stack of a chain."""
        table = self._table
        if table.chain[row] is not chain or table.ref_cnt[row] or row in self._held or row in self._popped:
            return False
        return self._is_frequent is None or self._is_frequent[row] is self._flag

    def _last(self, stack: Stack, chain: RequestChain) -> int:
        """Return the row at the top of a stack that has some; sort it if needed."""
        if not stack.is_sorted:
            self._tidy(stack, chain)
        rows = stack.rows
        if len(rows) > stack.count:
            while not self._counts(rows[-1], chain):
                rows.pop()
        return rows[-1]

    def _pop_counting(self, stack: Stack, chain: RequestChain, count: int, step: int, popped: list[int]) -> None:
        """Pop rows of a stack until `popped` has `count`, or until all its entries count."""
        rows, step_of = stack.rows, self._table.step
        while stack.count and len(popped) < count and len(rows) > stack.count:
            row = rows.pop()
            if self._counts(row, chain):
                stack.count -= 1
                if step_of[row] == step:
                    self._held[row] = None
                else:
                    popped.append(row)
                    self._popped.add(row)

    def _tidy(self, stack: Stack, chain: RequestChain, gone: Collection[int] = ()) -> None:
        """Drop the entries that do not count, and those of the rows `gone`; sort the others if needed."""
        counts = self._counts
        rows = [row for row in dict.fromkeys(reversed(stack.rows)) if row not in gone and counts(row, chain)]
        rows.reverse()
        if not stack.is_sorted:
            rows.sort(key=self._table.position.__getitem__)
        stack.rows, stack.is_sorted = unwatched(rows), True

    def _push(self, chain: RequestChain, rows: list[int]) -> None:
        """Add rows of one chain to its stack."""
        position_of = self._table.position
        stack = self.stacks.get(chain)
        if stack is None:
            stack = self._begin(chain)
        positions = [position_of[row] for row in rows]
        if stack.is_sorted and (positions[0] < stack.top or (len(rows) > 1 and positions != sorted(positions))):
            stack.is_sorted = False
        stack.top = max(stack.top, positions[-1] if stack.is_sorted else max(positions))
        stack.rows += rows
        stack.count += len(rows)

    def _take(self, chain: RequestChain, rows: list[int]) -> None:
        """Remove rows of one chain from its stack."""
        stack, count = self.stacks[chain], len(rows)
        stack.count -= count
        if not stack.count:
            del self.stacks[chain]
        elif stack.rows[-count:] == rows:
            del stack.rows[-count:]
        elif len(stack.rows) > 2 * stack.count + QUEUE_SPARE:
            self._tidy(stack, chain, set(rows))

    def _begin(self, chain: RequestChain) -> Stack:
        if len(self._queue) > 2 * len(self.stacks) + QUEUE_SPARE:
            self._queue = [(each.last_use, next(self._numbers), each) for each in self.stacks]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (chain.last_use, next(self._numbers), chain))
        stack = self.stacks[chain] = Stack()
        return stack
