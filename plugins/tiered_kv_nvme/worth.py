"""What a block is worth on the disk: the hits that blocks like it bring, for the room and time that they take.

A block's state is two bytes in its segment's table: how often it was used, whether it was read where it is, and the
tick of its last use. Blocks that were evicted are remembered by four bytes each, so that their return is evidence, too.
`tiered_kv/hit_density.py` has the estimates. docs/reference/nvme.md says how the reclaimer uses them.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.hit_density import AGES_PER_TURNOVER, BUCKETS, EDGES, LEVELS, HitDensity, Table
from tiered_kv_nvme.layout import EntryTable
from tiered_kv_nvme.segment import Segment

READ = 4
"""The bit of a state that says that the block was read since it was written where it is."""
RELOCATED_SHARE_MAX = 0.25
"""The share of a segment that may move: it limits the extra writes of reclaiming."""
MOVE_PRICE = 1.25
"""What a block has to be worth to move, as a multiple of the mean block: its room, and the cost of the write."""
ABOUT = 1.1
"""The factor between two losses that are told apart."""
SEGMENTS_PER_RANKING = 16
"""Of so many segments, one is reclaimed before they are ranked again."""
DENSITY_MIN = 1 / 256
"""Hits of a block in a tick: those that bring less, one in 32 turnovers, go in the order of their age."""

GHOSTS_MAX = 1 << 24
"""Evicted blocks that are remembered at most, in 64 MiB."""

_USES = 4  # uses that are told apart: 0, 1, 2, and more
_USES_MASK = 3
_TICK_SHIFT = 3
_TICKS = 1 << 13  # after so many, 1024 turnovers, a block that was never used again looks new
_AGES = int(EDGES[-1])  # ages that are told apart
_BUCKETS = [bisect_right(EDGES, age) - 1 for age in range(_AGES)]
_BUCKET_ARRAY = np.array(_BUCKETS, np.uint16)
_FIRST_AGES = [(bucket, _BUCKETS.index(bucket)) for bucket in sorted(set(_BUCKETS))]
"""Each bucket that an age in whole ticks can be in, and the first such age."""
_BLOCKS_AT_ONCE = 1 << 14  # in about 100 us

_Numbers = np.ndarray[Any, np.dtype[np.uint64]]
_digest = xxhash.xxh3_64_intdigest


class Worth:
    """Learns from stores and loads what blocks are worth, by how often and how long ago they were used.

    The time is that of the segments filled by stores: a tick is an eighth of them all. Any thread may note a use. Where
    two do at once, a count may be lost, which an estimate bears.

    Args:
        blocks: How many the tier has room for: so many evicted ones are remembered, less those that others displace.
        segments: How many the tier has room for.
    """

    def __init__(self, blocks: int, segments: int) -> None:
        self._segments = segments
        self._filled = self._ticks = 0
        self._now = 0  # the tick, as in a state
        self._density = HitDensity(1, _USES)
        self._densities: Table = np.ones(_USES * BUCKETS)  # as of the last choice, likewise the price of a move
        self._price = 1.0
        self._ranked: list[Segment] = []  # to be reclaimed next, the last first
        self._waiting = [[0] * _AGES for _ in range(_USES)]  # blocks, remembered ones too, by uses and last use
        # A state below 16 bits of the key's digest; 0 for none.
        self._ghosts = np.zeros(min(max(1, blocks), GHOSTS_MAX), np.uint32)

    def first_states(self, keys: Sequence[OffloadKey]) -> array[int]:
        """Return the states of blocks that are stored. One that is remembered was used once more."""
        digests, slots = self._slots(keys)
        found = self._ghosts[slots]
        states = array("H", [self._now << _TICK_SHIFT]) * len(keys)
        self._waiting[0][self._now % _AGES] += len(keys)
        for at in np.flatnonzero(found >> 16 == digests >> 48 | 1).tolist():
            self._ghosts[slots[at]] = 0
            uses = self._returned(int(found[at]) & 0xFFFF)
            self._waiting[0][self._now % _AGES] -= 1
            self._waiting[uses][self._now % _AGES] += 1
            states[at] |= uses
        return states

    def use(self, table: EntryTable, ordinal: int, read: int = 0) -> None:
        """Note that a block is used: with `READ` by a load, else by a touch.

        A touch in the tick of the last use is none: engines touch what they have just stored.
        """
        state, now = table.used[ordinal], self._now
        if read or state >> _TICK_SHIFT != now:
            uses = self._returned(state)
            self._waiting[uses][now % _AGES] += 1
            table.used[ordinal] = now << _TICK_SHIFT | state & READ | read | uses

    def evicted(self, keys: Sequence[OffloadKey], states: Sequence[int]) -> None:
        """Remember blocks."""
        digests, slots = self._slots(keys)
        ghosts = ((digests >> 48 | 1) << 16 | np.array(states, np.uint64)).astype(np.uint32)
        displaced = self._ghosts[slots]
        by_slot = np.argsort(slots, kind="stable")  # the later one of two displaces the earlier one
        again = slots[by_slot[1:]] == slots[by_slot[:-1]]
        displaced[by_slot[1:][again]] = ghosts[by_slot[:-1][again]]
        self._ghosts[slots] = ghosts
        left = displaced[displaced > 0] & 0xFFFF
        for state in left[self._now - (left >> _TICK_SHIFT) & _TICKS - 1 < _AGES].tolist():
            self._waiting[state & _USES_MASK][(state >> _TICK_SHIFT) % _AGES] -= 1

    def note_filled(self) -> None:
        """Note that stores begin to fill one more segment."""
        self._filled += 1

    def restart(self, tables: Sequence[EntryTable]) -> None:
        """Take over the blocks of tables, the oldest first, as if they had just been written one after the other."""
        for filled, table in enumerate(tables):
            tick = filled * AGES_PER_TURNOVER // self._segments
            table.used = array("H", [tick % _TICKS << _TICK_SHIFT]) * len(table)
            self._waiting[0][tick % _AGES] += len(table)
        self._filled = len(tables)
        self._ticks = self._filled * AGES_PER_TURNOVER // self._segments
        self._now = self._ticks % _TICKS

    # The reclaimer's thread.

    def advance(self) -> None:
        """Bring the time up to the segments filled, and learn from what has been counted."""
        while self._ticks < self._filled * AGES_PER_TURNOVER // self._segments:
            self._tick()

    def least(self, segments: Sequence[Segment], pause: Callable[[], None] = lambda: None) -> Segment:
        """Return which segment loses least when it is reclaimed, the first of those that lose about as little.

        One ranking serves for a sixteenth of the segments.
        A block is lost at its density, or moves at the price of a move, as far as blocks may. `pause` is called
        between pieces of the work.
        """
        while self._ranked:
            segment = self._ranked.pop()
            if segment in segments:
                return segment
        self._densities = np.maximum(DENSITY_MIN, np.exp(np.array(self._density.level) / LEVELS))
        counts = self._counted([segment.table for segment in segments], pause)
        self._price = MOVE_PRICE * (counts.sum(0) @ self._densities) / max(1, counts.sum())
        best_first = np.argsort(-self._densities, kind="stable")
        moved = np.minimum(counts[:, best_first].cumsum(1), RELOCATED_SHARE_MAX * counts.sum(1, keepdims=True))
        gained = np.maximum(0, self._densities[best_first] - self._price)
        lost = counts @ self._densities - np.diff(moved, axis=1, prepend=0) @ gained
        order = np.argsort(np.round(np.log(lost + DENSITY_MIN) / math.log(ABOUT)), kind="stable")
        self._ranked = [segments[row] for row in order[: -(-len(segments) // SEGMENTS_PER_RANKING)][::-1]]
        return self._ranked.pop()

    def movable(self, table: EntryTable) -> list[int]:
        """Return the ordinals of blocks that are worth more than a move, as of the last ranking, the best first."""
        worth = self._densities[self._cells([table])]
        ordinals = np.flatnonzero(worth > self._price)
        best: list[int] = ordinals[np.argsort(-worth[ordinals], kind="stable")].tolist()
        return best

    def _counted(self, tables: Sequence[EntryTable], pause: Callable[[], None]) -> Table:
        """Return how many blocks of each cell each table has; small tables are counted together."""
        cells, counts = self._densities.size, []
        lengths = [len(table) for table in tables]
        ends = np.cumsum(lengths)
        for _, group in groupby(range(len(tables)), lambda row: ends[row] // _BLOCKS_AT_ONCE):
            rows = list(group)
            first, end = rows[0], rows[-1] + 1
            places = np.repeat(range(end - first), lengths[first:end]) * cells + self._cells(tables[first:end])
            counts.append(np.bincount(places, minlength=(end - first) * cells).reshape(-1, cells))
            if end < len(tables):
                pause()
        return np.concatenate(counts)

    def _cells(self, tables: Sequence[EntryTable]) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """Return the cell of each block now, one table after the other."""
        states = np.concatenate([np.array(table.used) for table in tables])
        ages = np.minimum(self._now - (states >> _TICK_SHIFT) & _TICKS - 1, _AGES - 1)
        cells: np.ndarray[Any, np.dtype[np.uint16]] = (states & _USES_MASK) * BUCKETS + _BUCKET_ARRAY[ages]
        return cells

    def _slots(self, keys: Sequence[OffloadKey]) -> tuple[_Numbers, _Numbers]:
        """Return the digest of each key, and where its ghost is."""
        digests = np.fromiter(map(_digest, keys), np.uint64, len(keys))
        return digests, digests % len(self._ghosts)

    def _returned(self, state: int) -> int:
        """Count the return of a block, and return how often it was used with that."""
        uses, tick = state & _USES_MASK, state >> _TICK_SHIFT
        age = self._now - tick & _TICKS - 1
        if age < _AGES:
            bucket = _BUCKETS[age]
            self._density.hits[uses * BUCKETS + bucket] += 1
            if not bucket:
                self._density.seen[uses * BUCKETS] += 1
            self._waiting[uses][tick % _AGES] -= 1
        return min(uses + 1, _USES_MASK)

    def _tick(self) -> None:
        """Count the blocks that come to their next bucket."""
        self._ticks += 1
        self._now = self._ticks % _TICKS
        seen = self._density.seen
        for uses, waiting in enumerate(self._waiting):
            waiting[self._now % _AGES] = 0
            for bucket, age in _FIRST_AGES[1:]:
                count = max(0, waiting[(self._now - age) % _AGES])
                seen[uses * BUCKETS + bucket] += count
                if bucket == 1:
                    seen[uses * BUCKETS] += count
        self._density.learn()
