"""An order of rows by the request that used their blocks last, from whose prefix the tail goes first.

The policies by recency (`recency.py`) have one or two, on the scheduler's thread. An order holds rows of evictable
blocks only, never a pinned one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable
from typing import Any

from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.row_table import RowTable, unwatched

QUEUE_SPARE = 64
"""How many entries of a queue may be out of date, besides one for each chain. A stack has as many spare entries."""


class Stack:
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


_NO_STACK = Stack()
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

    def __init__(self, table: RowTable, stack_of: list[Stack | None]) -> None:
        self._table = table
        self.stacks: dict[RequestChain, Stack] = {}
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
        left: Stack | None = None  # the stack of the row before
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

    def _last(self, stack: Stack) -> int:
        """Return the row at the top of a stack that has some; sort it if needed."""
        rows, stack_of = stack.rows, self._stack_of
        if not stack.is_sorted:
            self._tidy(stack)
            rows = stack.rows
        while stack_of[rows[-1]] is not stack:
            rows.pop()
        return rows[-1]

    def _tidy(self, stack: Stack) -> None:
        """Drop the entries that do not count, and sort the others."""
        stack_of = self._stack_of
        rows = [row for row in dict.fromkeys(reversed(stack.rows)) if stack_of[row] is stack]
        rows.reverse()
        if not stack.is_sorted:
            rows.sort(key=self._table.position.__getitem__)
        stack.rows, stack.is_sorted = unwatched(rows), True

    def _shrink(self, stack: Stack | None) -> None:
        """Drop the entries of a stack that do not count, if they are more than the others."""
        if stack is not None and len(stack.rows) > 2 * stack.count + QUEUE_SPARE:
            self._tidy(stack)

    def _forget(self, row: int) -> None:
        """Forget the chain of a row, which was its last one."""
        chain = self._table.chain[row]
        assert chain is not None
        del self.stacks[chain]

    def _begin(self, chain: RequestChain) -> Stack:
        if len(self._queue) > 2 * len(self.stacks) + QUEUE_SPARE:
            self._queue = [(each.last_use, next(self._numbers), each) for each in self.stacks]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (chain.last_use, next(self._numbers), chain))
        stack = self.stacks[chain] = Stack()
        return stack
