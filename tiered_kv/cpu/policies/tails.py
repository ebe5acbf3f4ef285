"""Tails: blocks grouped by the request that was the last to use them, and the order of their eviction.

`DensityPolicy` (`density.py`) makes the tails, fills their fields, and asks `TailOrder` for the blocks to evict. Both
run on the scheduler's thread, which owns them.

What must stay true: a tail loses its deepest block first. A block stays while another tail is attached to it, since
that tail's prefix contains the block. So the resident blocks are whole prefixes. A request that goes on after it has
lost blocks stores *orphans*: blocks after an absent one. They are evicted first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, le
from typing import Any

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.hit_density import BUCKETS
from tiered_kv.cpu.row_table import NO_KEY, RowTable

CIRCLE_MAX = 100
"""Limit of tails in a circle of waiting tails; a longer circle is not detected."""
QUEUE_SPARE = 64
"""Entries that a cell may have beyond twice the number of its tails, before it removes those that are out of date."""
_size_of = attrgetter("size")


@dataclass(slots=True, eq=False)
class Tail:
    """A range of positions in one request's prefix: the part shared with other requests, or the part after it."""

    number: int  # requests are numbered in the order of their begin
    since: float  # when the request began, in the policy's units of age, not in seconds
    is_shared: bool = False
    turn: int = 0  # requests in a row that have used it
    kind: int = 0  # from the request's hints
    group: int = -1  # from kind, turn and size; -1 before it has had blocks
    expires_s: float = math.inf
    began_s: float = 0.0  # when the request began, by the policy's clock
    said_s: float = 0.0  # its hint `expect_return`; 0 without one
    late: float = 0.0
    """How late the requests of its session come: the logarithm of real over hinted time, as a running mean."""
    pace: float | None = None
    """Time between the requests of its session: the logarithm of seconds, as a running mean. None before the second."""
    new_blocks: int = 0  # number of blocks that the request added
    rows: dict[int, None] = field(default_factory=dict)  # of evictable blocks
    is_sorted: bool = True  # whether `rows` is in the order of positions
    start: int = 0  # first position
    end: int = 0  # first position that is not resident; later blocks are orphans
    step: int = 1  # from one position to the next
    lost: int = 0  # evicted positions from `end` on
    shared: Tail | None = None  # the shared part of the same prefix
    share: float = 1.0  # the part of this tail that no later request has used
    bucket: int = 0  # the bucket of its age
    is_aging: bool = False  # whether it will move to the next bucket
    is_storing: bool = False  # whether the request has begun to store blocks
    cell: int = -1  # where it waits for eviction; -1 while it does not wait
    parent: OffloadKey = NO_KEY  # the block that it follows
    after: int = 0  # position of `parent`
    is_attached: bool = False  # whether `parent` must stay while this tail has blocks
    ghost: OffloadKey = NO_KEY  # key of its first evicted block

    def length(self) -> int:
        """Return the number of its positions, the evicted ones included."""
        return (self.end - self.start) // self.step + self.lost

    def count(self, positions: Sequence[int]) -> int:
        """Return how many of its positions are in `positions`, which rise or fall; several groups share positions."""
        return min(len(positions), abs(positions[-1] - positions[0]) // self.step + 1)

    def first(self, table: RowTable) -> int:
        """Sort the rows if needed, and return the lowest position."""
        if not self.is_sorted:
            self.rows = dict.fromkeys(sorted(self.rows, key=table.position.__getitem__))
            self.is_sorted = True
        return table.position[next(iter(self.rows))]


def runs_of(rows: Iterable[int], table: RowTable) -> Iterator[tuple[Tail, list[int]]]:
    """Yield runs of consecutive rows of one tail; rows without a tail are left out."""
    chain_of, position_of = table.chain, table.position
    chain: RequestChain | None = None
    tail: Tail | None = None
    start, stop = 0.0, 0.0
    run: list[int] = []
    for row in rows:
        position = position_of[row]
        if chain_of[row] is not chain or not start <= position < stop:
            if tail is not None and run:
                yield tail, run
            run = []
            chain = chain_of[row]
            tail = chain.note if chain is not None else None
            start, stop = 0, math.inf
            if tail is not None and tail.shared is not None:
                if position < tail.start:
                    tail, stop = tail.shared, tail.start
                else:
                    start = tail.start
        run.append(row)
    if tail is not None and run:
        yield tail, run


class _Cell:
    """The tails that wait in one cell: a heap by number, so that the order does not depend on when blocks were added.

    An entry is out of date if its tail has left the cell.
    """

    __slots__ = ("_ties", "queue", "size")

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, Tail]] = []
        self.size = 0
        self._ties = itertools.count()  # tails are not compared

    def enter(self, tail: Tail) -> None:
        if len(self.queue) > 2 * self.size + QUEUE_SPARE:
            kept = {each: None for _, _, each in self.queue if each.cell == tail.cell and each is not tail}
            self.queue = [(each.number, next(self._ties), each) for each in kept]
            heapq.heapify(self.queue)
        heapq.heappush(self.queue, (tail.number, next(self._ties), tail))
        self.size += 1

    def oldest(self, number: int) -> Tail:
        """Return the oldest tail of this cell, which has one; `number` is the cell's."""
        while (tail := self.queue[0][2]).cell != number:
            heapq.heappop(self.queue)
        return tail


class TailOrder:
    """The rows of evictable blocks by tail. The oldest tail of the lowest level loses blocks first.

    Tails wait in cells, one for each group and age: cell `group * BUCKETS + bucket`. `levels` has a number for each
    cell: its hit density, in steps (`HitDensity.level`). Owned by the manager's thread.
    """

    def __init__(self, table: RowTable, levels: Sequence[float]) -> None:
        self._table = table
        self.size = 0
        self._cells: list[_Cell] = []
        self._mask = 0  # its nth bit stands for the nth cell of the order
        self._protected: dict[int, None] = {}  # rows that were looked up in this step
        self._hanging: dict[OffloadKey, int] = {}  # number of attached tails, by the key of their parent
        self._blocked: dict[OffloadKey, Tail] = {}
        """Tails that are in no cell while other tails are attached to their last block, by that block's key."""
        self._spared: Sequence[Tail] = ()  # tails that the present `pop` leaves whole
        self._orphaned: dict[Tail, None] = {}  # tails that may have orphans
        self.sort(levels)

    def sort(self, levels: Sequence[float]) -> None:
        """Set the levels of all cells; the number of cells may have grown."""
        order = np.argsort(levels, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        self._levels = levels
        self._order: list[int] = order.tolist()
        self._rank: list[int] = rank.tolist()
        self._cells += [_Cell() for _ in range(len(levels) - len(self._cells))]
        self._mask = sum(map((1).__lshift__, itertools.compress(self._rank, map(_size_of, self._cells))))

    def add(self, rows: Iterable[int]) -> dict[Tail, None]:
        """Add rows, and return their tails; the caller then calls `enter` for each."""
        touched: dict[Tail, None] = {}
        position_of, chain_of = self._table.position, self._table.chain
        for tail, run in runs_of(rows, self._table):
            positions = [position_of[row] for row in run]
            if tail.is_sorted:
                before = position_of[next(reversed(tail.rows))] if tail.rows else -1
                tail.is_sorted = before <= positions[0] and all(map(le, positions, positions[1:]))
            tail.rows.update(dict.fromkeys(run))
            if tail.lost:
                self._orphaned[tail] = None
            else:
                tail.end = max(tail.end, max(positions) + 1)
            chain = chain_of[run[0]]
            assert chain is not None
            tail.step = chain.step
            if tail.step > 1 and not tail.start:  # positions in tokens need not begin with 0
                tail.start = min(positions) + 1 - tail.step
            self.size += len(run)
            touched[tail] = None
        for tail in touched:
            self._attach(tail)
        return touched

    def take_out(self, rows: Iterable[int]) -> list[int]:
        """Remove the rows that are in the order, and return them."""
        taken: list[int] = []
        for tail, run in runs_of(rows, self._table):
            held = tail.rows
            before = len(taken)
            for row in run if held or self._protected else ():
                if row in held:
                    del held[row]
                    taken.append(row)
                elif row in self._protected:
                    del self._protected[row]
                    taken.append(row)
            if len(taken) == before:
                continue
            if held:
                self.enter(tail)  # it no longer waits for tails that were attached to these blocks
            else:
                self._emptied(tail)
        self.size -= len(taken)
        return taken

    def clear(self) -> list[Any]:  # Any: dictionaries of rows
        """Remove all rows, and return them by tail. Its time grows with the number of tails, not of blocks."""
        waiting = [tail for cell in self._cells for _, _, tail in cell.queue]
        removed: list[Any] = []
        for tail in (*waiting, *self._blocked.values(), *self._orphaned):
            if tail.rows:
                removed.append(tail.rows)
                self._emptied(tail)
        self._protected.clear()
        self.size = 0
        return removed

    def enter(self, tail: Tail) -> None:
        """Put a tail with blocks into the cell of its group and age."""
        if tail.cell < 0 and tail.rows and tail not in self._spared:
            tail.cell = number = tail.group * BUCKETS + tail.bucket
            cell = self._cells[number]
            if not cell.size:
                self._mask |= 1 << self._rank[number]
            cell.enter(tail)

    def leave(self, tail: Tail) -> None:
        """Remove a tail from its cell."""
        number = tail.cell
        if number >= 0:
            tail.cell = -1
            cell = self._cells[number]
            cell.size -= 1
            if not cell.size:
                cell.queue.clear()
                self._mask ^= 1 << self._rank[number]

    def pop(self, count: int, step: int, spared: Sequence[Tail]) -> list[tuple[Tail, list[int]]] | None:
        """Remove `count` rows, and return them by tail, the deepest block first.

        Rows with this `step` are set aside until the step ends. Blocks of spared tails stay. If too few rows can
        be removed, none is, and the result is None.
        """
        self._spared = spared
        for tail in spared:
            self.leave(tail)
        cuts: list[tuple[Tail, list[int]]] = []
        missing = count
        while missing and self._orphaned:
            tail = next(iter(self._orphaned))
            cuts.append((tail, self._cut(tail, missing, step, tail.end)))
            missing -= len(cuts[-1][1])
            if missing:
                self._orphaned.pop(tail, None)
        while missing and (self._mask or self._unblock()):
            tail = self._least()
            cuts.append((tail, self._cut(tail, missing, step)))
            missing -= len(cuts[-1][1])
        self.size -= count - missing
        if missing:
            for tail in self.add(row for _, cut in cuts for row in cut):
                self.enter(tail)
        self._spared = ()
        for tail in spared:
            if tail.rows:
                self._attach(tail)
                self.enter(tail)
        return None if missing else cuts

    def end_step(self) -> list[int]:
        """Remove and return the rows that were set aside."""
        held, self._protected = self._protected, {}
        self.size -= len(held)
        return list(held)

    def hang(self, tail: Tail, parent: int) -> None:
        """Attach a tail to the block that it follows, which is in the row `parent`."""
        self._detach(tail)
        tail.parent, tail.after = self._table.key[parent], self._table.position[parent]
        if tail.rows:
            self._attach(tail)

    def _least(self) -> Tail:
        """Return the oldest tail in the cells of the lowest level; at least one cell has a tail."""
        order, levels, mask = self._order, self._levels, self._mask
        number = order[(mask & -mask).bit_length() - 1]
        least, found = levels[number], self._cells[number].oldest(number)
        while mask := mask & (mask - 1):
            number = order[(mask & -mask).bit_length() - 1]
            if levels[number] > least:
                break
            tail = self._cells[number].oldest(number)
            if tail.number < found.number:
                found = tail
        return found

    def _cut(self, tail: Tail, count: int, step: int, start: int = 0) -> list[int]:
        """Remove up to `count` rows from the end of a tail, down to position `start`.

        A block that another tail is attached to stays, and all blocks before it.
        """
        tail.first(self._table)
        rows, hanging = tail.rows, self._hanging
        key_of, position_of, step_of = self._table.key, self._table.position, self._table.step
        cut: list[int] = []
        while rows and len(cut) < count:
            row, _ = rows.popitem()
            if position_of[row] < start or (key_of[row] in hanging and self._block(tail, key_of[row])):
                rows[row] = None
                break
            if step_of[row] == step:
                self._protected[row] = None
            else:
                cut.append(row)
        if not rows:
            self._emptied(tail)
        return cut

    def _block(self, tail: Tail, key: OffloadKey) -> bool:
        """Take a tail out of its cell while other tails are attached to this block of it.

        Return False, and keep the tail in its cell, if one of the others waits for this tail. Without that check,
        requests that used blocks in contradicting orders would keep them for ever.
        """
        self._blocked[key] = tail
        waiting = tail
        for _ in range(CIRCLE_MAX):
            owner = self._blocked.get(waiting.parent) if waiting.is_attached else None
            if owner is None:
                break
            if owner is tail:
                del self._blocked[key], self._hanging[key]
                return False
            waiting = owner
        self.leave(tail)
        return True

    def _unblock(self) -> bool:
        """Enter the tails that wait for spared ones, or any tail if all wait for each other."""
        for tail in self._spared:
            self._detach(tail)
        while self._blocked and not self._mask:
            key, tail = self._blocked.popitem()
            self._hanging.pop(key, None)
            self.enter(tail)
        return bool(self._mask)

    def _emptied(self, tail: Tail) -> None:
        tail.rows, tail.is_sorted = {}, True  # a new one: a dictionary does not shrink
        self._orphaned.pop(tail, None)
        self.leave(tail)
        self._detach(tail)

    def _attach(self, tail: Tail) -> None:
        if not tail.parent or (tail.start <= tail.after and tail.first(self._table) <= tail.after):
            self._detach(tail)  # the tail has blocks before its parent again
        elif not tail.is_attached:
            self._hanging[tail.parent] = self._hanging.get(tail.parent, 0) + 1
            tail.is_attached = True

    def _detach(self, tail: Tail) -> None:
        if tail.is_attached:
            tail.is_attached = False
            left = self._hanging.get(tail.parent, 1) - 1
            if left:
                self._hanging[tail.parent] = left
                return
            self._hanging.pop(tail.parent, None)
            owner = self._blocked.pop(tail.parent, None)
            if owner is not None:
                self.enter(owner)
