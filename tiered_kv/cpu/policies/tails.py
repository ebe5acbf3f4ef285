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
from tiered_kv.cpu.backend import NO_KEY, CPUBlock, RequestChain
from tiered_kv.cpu.hit_density import BUCKETS

CIRCLE_MAX = 100
"""Limit of tails in a circle of waiting tails; a longer circle is not detected."""
QUEUE_SPARE = 64
"""Entries that a cell may have beyond twice the number of its tails, before it removes those that are out of date."""
_id_of, _position_of, _size_of = attrgetter("block_id"), attrgetter("position"), attrgetter("size")


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
    blocks: dict[int, CPUBlock] = field(default_factory=dict)  # evictable, by block_id
    is_sorted: bool = True  # whether `blocks` is in the order of positions
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

    def count(self, blocks: Sequence[CPUBlock]) -> int:
        """Return the number of positions of its blocks; several KV cache groups have the same positions."""
        return min(len(blocks), abs(blocks[-1].position - blocks[0].position) // self.step + 1)

    def first(self) -> int:
        """Sort the blocks if needed, and return the lowest position."""
        if not self.is_sorted:
            self.blocks = {block.block_id: block for block in sorted(self.blocks.values(), key=_position_of)}
            self.is_sorted = True
        return next(iter(self.blocks.values())).position


def runs_of(blocks: Iterable[CPUBlock]) -> Iterator[tuple[Tail, list[CPUBlock]]]:
    """Yield runs of consecutive blocks of one tail; blocks without a tail are left out."""
    chain: RequestChain | None = None
    tail: Tail | None = None
    start, stop = 0.0, 0.0
    run: list[CPUBlock] = []
    for block in blocks:
        position = block.position
        if block.chain is not chain or not start <= position < stop:
            if tail is not None and run:
                yield tail, run
            run = []
            chain = block.chain
            tail = chain.note if chain is not None else None
            start, stop = 0, math.inf
            if tail is not None and tail.shared is not None:
                if position < tail.start:
                    tail, stop = tail.shared, tail.start
                else:
                    start = tail.start
        run.append(block)
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
    """The evictable blocks by tail. The oldest tail of the lowest level loses blocks first.

    Tails wait in cells, one for each group and age: cell `group * BUCKETS + bucket`. `levels` has a number for each
    cell: its hit density, in steps (`HitDensity.level`). Owned by the manager's thread.
    """

    def __init__(self, levels: Sequence[float]) -> None:
        self.size = 0
        self._cells: list[_Cell] = []
        self._mask = 0  # its nth bit stands for the nth cell of the order
        self._protected: dict[int, CPUBlock] = {}  # by block_id: looked up in this step
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

    def add(self, blocks: Iterable[CPUBlock]) -> dict[Tail, None]:
        """Add blocks, and return their tails; the caller then calls `enter` for each."""
        touched: dict[Tail, None] = {}
        for tail, run in runs_of(blocks):
            positions = list(map(_position_of, run))
            if tail.is_sorted:
                before = next(reversed(tail.blocks.values())).position if tail.blocks else -1
                tail.is_sorted = before <= positions[0] and all(map(le, positions, positions[1:]))
            tail.blocks.update(zip(map(_id_of, run), run, strict=True))
            if tail.lost:
                self._orphaned[tail] = None
            else:
                tail.end = max(tail.end, max(positions) + 1)
            assert run[0].chain is not None
            tail.step = run[0].chain.step
            if tail.step > 1 and not tail.start:  # positions in tokens need not begin with 0
                tail.start = min(positions) + 1 - tail.step
            self.size += len(run)
            touched[tail] = None
        for tail in touched:
            self._attach(tail)
        return touched

    def take_out(self, blocks: Iterable[CPUBlock]) -> list[CPUBlock]:
        """Remove the blocks that are in the order, and return them."""
        taken: list[CPUBlock] = []
        for tail, run in runs_of(blocks):
            held = tail.blocks
            before = len(taken)
            for block in run if held or self._protected else ():
                if held.get(block.block_id) is block:
                    del held[block.block_id]
                    taken.append(block)
                elif self._protected.pop(block.block_id, None) is not None:
                    taken.append(block)
            if len(taken) == before:
                continue
            if held:
                self.enter(tail)  # it no longer waits for tails that were attached to these blocks
            else:
                self._emptied(tail)
        self.size -= len(taken)
        return taken

    def clear(self) -> dict[Any, Any]:  # Any: the policy's own
        """Remove all blocks, and return them by tail. Its time grows with the number of tails, not of blocks."""
        waiting = [tail for cell in self._cells for _, _, tail in cell.queue]
        removed: dict[Any, Any] = {}
        for tail in (*waiting, *self._blocked.values(), *self._orphaned):
            if tail.blocks:
                removed[tail] = tail.blocks
                self._emptied(tail)
        self._protected.clear()
        self.size = 0
        return removed

    def enter(self, tail: Tail) -> None:
        """Put a tail with blocks into the cell of its group and age."""
        if tail.cell < 0 and tail.blocks and tail not in self._spared:
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

    def pop(self, count: int, step: int, spared: Sequence[Tail]) -> list[tuple[Tail, list[CPUBlock]]] | None:
        """Remove `count` blocks, and return them by tail, the deepest block first.

        Blocks with this `step` are set aside until the step ends. Blocks of spared tails stay. If too few blocks can
        be removed, none is, and the result is None.
        """
        self._spared = spared
        for tail in spared:
            self.leave(tail)
        cuts: list[tuple[Tail, list[CPUBlock]]] = []
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
            for tail in self.add(block for _, cut in cuts for block in cut):
                self.enter(tail)
        self._spared = ()
        for tail in spared:
            if tail.blocks:
                self._attach(tail)
                self.enter(tail)
        return None if missing else cuts

    def end_step(self) -> list[CPUBlock]:
        """Remove and return the blocks that were set aside."""
        held, self._protected = self._protected, {}
        self.size -= len(held)
        return list(held.values())

    def hang(self, tail: Tail, parent: CPUBlock) -> None:
        """Attach a tail to the block that it follows."""
        self._detach(tail)
        tail.parent, tail.after = parent.key, parent.position
        if tail.blocks:
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

    def _cut(self, tail: Tail, count: int, step: int, start: int = 0) -> list[CPUBlock]:
        """Remove up to `count` blocks from the end of a tail, down to position `start`.

        A block that another tail is attached to stays, and all blocks before it.
        """
        tail.first()
        blocks, hanging = tail.blocks, self._hanging
        cut: list[CPUBlock] = []
        while blocks and len(cut) < count:
            block_id, block = blocks.popitem()
            if block.position < start or (block.key in hanging and self._block(tail, block.key)):
                blocks[block_id] = block
                break
            if block.step == step:
                self._protected[block.block_id] = block
            else:
                cut.append(block)
        if not blocks:
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
        tail.blocks, tail.is_sorted = {}, True  # a new one: a dictionary does not shrink
        self._orphaned.pop(tail, None)
        self.leave(tail)
        self._detach(tail)

    def _attach(self, tail: Tail) -> None:
        if not tail.parent or (tail.start <= tail.after and tail.first() <= tail.after):
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
