"""Tails: blocks by the request that was the last to use them, and the order in which they are evicted.

Blocks leave a tail deepest first, and not before the tails that hang off them, so what is resident is whole prefixes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, lt

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import NO_KEY, CPUBlock, RequestChain
from tiered_kv.hit_density import BUCKETS

CIRCLE_MAX = 100
"""Tails in the longest circle that is noticed."""
_position_of = attrgetter("position")


@dataclass(slots=True, eq=False)
class Tail:
    """Blocks of one request from one place in its prefix on: those that follow what it shares, or those shared.

    Attributes:
        number: Of the request, in the order in which they began; `since`, when it did.
        turn: How many requests in a row have used it.
        kind: By what its request said; `group`, by that, its turn and its size; -1 before it has had blocks.
        expires_s: When it expires.
        new_blocks: How many the request added; `is_storing`, whether it has begun to.
        blocks: Those that may be evicted, by position; in rising order where `is_sorted`.
        start: The first position; `end`, the first that is not resident; `lost`, how many were evicted from there on.
        shared: Of the tail that follows it, the one that is shared.
        share: Of the tail, what no request has used since.
        bucket: Of its age; while `is_aging`, the tail waits for the next one.
        cell: Where it waits for eviction; negative while it does not.
        parent: The key of the block that it hangs off while `is_attached`, which was at the position `after`.
        ghost: The key by which its evicted part is known.
    """

    number: int
    since: float
    is_shared: bool = False
    turn: int = 0
    kind: int = 0
    group: int = -1
    expires_s: float = math.inf
    new_blocks: int = 0
    blocks: dict[int, CPUBlock] = field(default_factory=dict)
    is_sorted: bool = True
    start: int = 0
    end: int = 0
    lost: int = 0
    shared: Tail | None = None
    share: float = 1.0
    bucket: int = 0
    is_aging: bool = False
    is_storing: bool = False
    cell: int = -1
    parent: OffloadKey = NO_KEY
    after: int = 0
    is_attached: bool = False
    ghost: OffloadKey = NO_KEY

    def first(self) -> int:
        """Return the lowest position of its blocks, which are in order then."""
        if not self.is_sorted:
            self.blocks = dict(sorted(self.blocks.items()))
            self.is_sorted = True
        return next(iter(self.blocks))


def runs_of(blocks: Iterable[CPUBlock]) -> Iterator[tuple[Tail, list[CPUBlock]]]:
    """Return the blocks by their tails, in runs, without those of no tail."""
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


class TailOrder:
    """The blocks that may be evicted, and which tail is the next to lose some: the oldest of the least level.

    Tails wait in cells, by group and age: number `group * BUCKETS + bucket`. Owned by the manager's thread.

    Args:
        levels: Of each cell.
    """

    def __init__(self, levels: Sequence[float]) -> None:
        self.size = 0
        self._cells: list[OrderedDict[Tail, None]] = []
        self._mask = 0  # its nth bit stands for the nth cell of the order
        self._protected: dict[int, CPUBlock] = {}  # by block_id: looked up in this step
        self._hanging: dict[OffloadKey, int] = {}  # tails that hang off a block, by its key
        self._blocked: dict[OffloadKey, Tail] = {}  # left their cell, because of what hangs off the block of this key
        self._spared: Sequence[Tail] = ()
        self.sort(levels)

    def sort(self, levels: Sequence[float]) -> None:
        """Take the levels of all cells, of which there may be more than before."""
        order = np.argsort(levels, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        self._levels = levels
        self._order: list[int] = order.tolist()
        self._rank: list[int] = rank.tolist()
        self._cells += [OrderedDict() for _ in range(len(levels) - len(self._cells))]
        self._mask = sum(1 << place for place, queue in zip(self._rank, self._cells, strict=True) if queue)

    def add(self, blocks: Iterable[CPUBlock]) -> dict[Tail, None]:
        """Add blocks, and return their tails, which are to `enter`."""
        touched: dict[Tail, None] = {}
        for tail, run in runs_of(blocks):
            positions = list(map(_position_of, run))
            if tail.is_sorted:
                before = next(reversed(tail.blocks), -1)
                tail.is_sorted = before < positions[0] and all(map(lt, positions, positions[1:]))
            tail.blocks.update(zip(positions, run, strict=True))
            tail.end = max(tail.end, max(positions) + 1)
            self.size += len(run)
            touched[tail] = None
        for tail in touched:
            self._attach(tail)
        return touched

    def take_out(self, blocks: Iterable[CPUBlock]) -> list[CPUBlock]:
        """Remove those of the blocks that are in the order, and return them."""
        taken: list[CPUBlock] = []
        for tail, run in runs_of(blocks):
            held = tail.blocks
            before = len(taken)
            for block in run if held or self._protected else ():
                if held.get(block.position) is block:
                    del held[block.position]
                    taken.append(block)
                elif self._protected.pop(block.block_id, None) is not None:
                    taken.append(block)
            if len(taken) == before:
                continue
            if held:
                self.enter(tail)  # what hung off the blocks hangs off none of the tail's now
            else:
                self._emptied(tail)
        self.size -= len(taken)
        return taken

    def enter(self, tail: Tail) -> None:
        """Let a tail wait in the cell of its group and age, if it has blocks."""
        if tail.cell < 0 and tail.blocks and tail not in self._spared:
            tail.cell = cell = tail.group * BUCKETS + tail.bucket
            queue = self._cells[cell]
            if not queue:
                self._mask |= 1 << self._rank[cell]
            queue[tail] = None

    def leave(self, tail: Tail) -> None:
        """Let a tail wait no longer."""
        cell = tail.cell
        if cell >= 0:
            tail.cell = -1
            queue = self._cells[cell]
            del queue[tail]
            if not queue:
                self._mask ^= 1 << self._rank[cell]

    def pop(self, count: int, step: int, spared: Sequence[Tail]) -> list[tuple[Tail, list[CPUBlock]]] | None:
        """Remove `count` blocks, and return them by their tails, with the deepest of a tail first.

        Blocks whose `step` is the given one are set aside until the step ends. Blocks of spared tails stay.
        None, with nothing removed, if there are not enough.
        """
        self._spared = spared
        for tail in spared:
            self.leave(tail)
        cuts: list[tuple[Tail, list[CPUBlock]]] = []
        missing = count
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
        """Note that a tail follows `parent` from now on."""
        self._detach(tail)
        tail.parent, tail.after = parent.key, parent.position
        if tail.blocks:
            self._attach(tail)

    def _least(self) -> Tail:
        order, levels, mask = self._order, self._levels, self._mask
        cell = order[(mask & -mask).bit_length() - 1]
        least, found = levels[cell], next(iter(self._cells[cell]))
        while mask := mask & (mask - 1):
            cell = order[(mask & -mask).bit_length() - 1]
            if levels[cell] > least:
                break
            tail = next(iter(self._cells[cell]))
            if tail.number < found.number:
                found = tail
        return found

    def _cut(self, tail: Tail, count: int, step: int) -> list[CPUBlock]:
        """Remove up to `count` blocks from the end of a tail, and none off which something hangs."""
        tail.first()
        blocks, hanging = tail.blocks, self._hanging
        cut: list[CPUBlock] = []
        while blocks and len(cut) < count:
            position, block = blocks.popitem()
            if block.key in hanging and self._block(tail, block.key):
                blocks[position] = block
                break
            if block.step == step:
                self._protected[block.block_id] = block
            else:
                cut.append(block)
        if not blocks:
            self._emptied(tail)
        return cut

    def _block(self, tail: Tail, key: OffloadKey) -> bool:
        """Let a tail wait for what hangs off its block. It does not if that waits for the tail itself.

        Requests that used blocks in contradicting orders would hold them for ever.
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
        """Enter a tail off which spared ones hang, or any where all wait for others."""
        for tail in self._spared:
            self._detach(tail)
        while self._blocked and not self._mask:
            key, tail = self._blocked.popitem()
            self._hanging.pop(key, None)
            self.enter(tail)
        return bool(self._mask)

    def _emptied(self, tail: Tail) -> None:
        tail.blocks, tail.is_sorted = {}, True  # a new one: a dictionary does not shrink
        self.leave(tail)
        self._detach(tail)

    def _attach(self, tail: Tail) -> None:
        if not tail.parent or (tail.start <= tail.after and tail.first() <= tail.after):
            self._detach(tail)  # blocks are back that the parent follows
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
