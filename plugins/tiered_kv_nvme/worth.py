"""The worth of a block on the disk: the hits that similar blocks bring, for the space and time that they take.

Stores, loads and touches note uses, on their own threads. The reclaimer's thread learns from them and ranks segments. A
lost note changes a rank, never a byte.

A block's state is two bytes in its segment's table. It has the number of uses, whether the block was read since it was
written there, and the tick of its last use. Each evicted block keeps four bytes, so that the tier learns if it
is stored again.
`tiered_kv/cpu/hit_density.py` has the estimates; docs/reference/nvme.md describes how the reclaimer uses them.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.hit_density import AGES_PER_TURNOVER, BUCKETS, EDGES, LEVELS, HitDensity, Table
from tiered_kv.system.step import give_way
from tiered_kv_nvme.layout import EntryTable
from tiered_kv_nvme.segment import Segment

READ = 4  # the bit of a state for a block that was read since it was written where it is
RELOCATED_SHARE_MAX = 0.25  # the share of a segment that may move: it limits the extra writes of reclaiming
MOVE_PRICE = 1.25
"""A block moves only if it is worth more than this many mean blocks: the move takes space, and a write.

With 1, hits were up to 1 % more or fewer, and 10 to 35 % more blocks moved per hit.
"""
LOSS_RATIO = 1.1
"""Losses that differ by less than this factor count as equal. Otherwise equally popular documents are cut apart."""
SEGMENTS_PER_RANKING = 16
"""A ranking of n segments serves for n / 16 reclaims, rounded up. One for n reclaims lost up to 2 % of the hits."""
DENSITY_MIN = 1 / 256
"""The least density, in hits of a block in a tick: one in 32 turnovers. Below it, the oldest blocks go first."""
EVICTED_MAX = 1 << 24  # evicted blocks that are remembered at most, in 64 MiB

_USES = 4  # classes of uses: 0, 1, 2, and more
_USES_MASK = 3
_TICK_SHIFT = 3
_TICKS = 1 << 13
"""Ticks before the clock begins anew: 1024 turnovers. A block whose last use is that old looks recently used."""
_AGES = int(EDGES[-1])  # ages in ticks that are distinguished
_BUCKETS = [bisect_right(EDGES, age) - 1 for age in range(_AGES)]
_BUCKET_ARRAY = np.array(_BUCKETS, np.uint16)
_FIRST_AGES = [(bucket, _BUCKETS.index(bucket)) for bucket in sorted(set(_BUCKETS))]
"""Each bucket that an age in whole ticks can have, and its first age."""
_BLOCKS_AT_ONCE = 1 << 14  # about 100 us

States = np.ndarray[Any, np.dtype[np.uint16]]
_Numbers = np.ndarray[Any, np.dtype[np.uint64]]
_digest = xxhash.xxh3_64_intdigest


class Worth:
    """Learns the worth of blocks from stores and loads, by the number and the age of their uses.

    A block's estimated worth is its density. Time advances as stores fill segments: a tick is an eighth of
    all `segments` that the capacity holds. The class remembers as many evicted blocks as the capacity holds `blocks`,
    less collisions. Any thread may note a use. Two threads at once may lose a count, which an estimate tolerates.
    """

    def __init__(self, blocks: int, segments: int) -> None:
        self._segments = segments
        self._ticks = 0
        self.filled = 0  # segments that stores have begun to fill
        self._now = 0  # the tick, as in a state
        self._density = HitDensity(1, _USES)
        self._densities: Table = np.ones(_USES * BUCKETS)
        """The densities at the last ranking, as the price is."""
        self._price = 1.0
        self._ranked: list[Segment] = []  # the next to reclaim is the last
        self._last_uses = [[0] * _AGES for _ in range(_USES)]  # number of blocks, with evicted ones: by uses, last tick
        self._evicted = np.zeros(min(max(1, blocks), EVICTED_MAX), np.uint32)  # 16 bits of digest above a state, or 0

    def first_states(self, keys: Sequence[OffloadKey]) -> array[int]:
        """Return the states of new blocks. For a block that is remembered, its return counts as a use."""
        digests, slots = self._slots(keys)
        found = self._evicted[slots]
        states = array("H", [self._now << _TICK_SHIFT]) * len(keys)
        self._last_uses[0][self._now % _AGES] += len(keys)
        for at in np.flatnonzero(found >> 16 == digests >> 48 | 1).tolist():
            self._evicted[slots[at]] = 0
            uses = self._note_return(int(found[at]) & 0xFFFF)
            self._last_uses[0][self._now % _AGES] -= 1
            self._last_uses[uses][self._now % _AGES] += 1
            states[at] |= uses
        return states

    def use(self, table: EntryTable, ordinal: int, read: int = 0) -> None:
        """Note the use of a block: `read` is `READ` for a load, 0 for a touch.

        A touch in the tick of the last use does not count: engines touch blocks that they have just stored.
        """
        state, now = table.states[ordinal], self._now
        if read or state >> _TICK_SHIFT != now:
            uses = self._note_return(state)
            self._last_uses[uses][now % _AGES] += 1
            table.states[ordinal] = now << _TICK_SHIFT | state & READ | read | uses

    def remember_evicted(self, keys: Sequence[OffloadKey], states: Sequence[int] | States) -> None:
        """Remember the states of evicted blocks; a block replaces another one that has its slot."""
        digests, slots = self._slots(keys)
        evicted = ((digests >> 48 | 1) << 16 | np.asarray(states, np.uint64)).astype(np.uint32)
        displaced = self._evicted[slots]
        by_slot = np.argsort(slots, kind="stable")  # where two blocks have one slot, the later displaces the earlier
        again = slots[by_slot[1:]] == slots[by_slot[:-1]]
        displaced[by_slot[1:][again]] = evicted[by_slot[:-1][again]]
        self._evicted[slots] = evicted
        lost = displaced[displaced > 0] & 0xFFFF
        for state in lost[self._now - (lost >> _TICK_SHIFT) & _TICKS - 1 < _AGES].tolist():
            self._last_uses[state & _USES_MASK][(state >> _TICK_SHIFT) % _AGES] -= 1

    def restart(self, tables: Sequence[EntryTable]) -> None:
        """Begin with recovered tables, the oldest first, as if they had just been written one after the other."""
        for filled, table in enumerate(tables):
            tick = filled * AGES_PER_TURNOVER // self._segments
            table.states = array("H", [tick % _TICKS << _TICK_SHIFT]) * len(table)
            self._last_uses[0][tick % _AGES] += len(table)
        self.filled = len(tables)
        self._ticks = self.filled * AGES_PER_TURNOVER // self._segments
        self._now = self._ticks % _TICKS

    # The reclaimer's thread.

    def advance(self) -> None:
        """Advance the time to the segments filled so far, and learn from the counts."""
        while self._ticks < self.filled * AGES_PER_TURNOVER // self._segments:
            self._tick()

    def least(self, segments: Sequence[Segment]) -> Segment:
        """Return the segment that loses least when it is reclaimed; the first of about equal ones.

        One ranking serves for a sixteenth of the segments.
        """
        while self._ranked:
            segment = self._ranked.pop()
            if segment in segments:
                return segment
        self._ranked = self.ranking(segments)[: -(-len(segments) // SEGMENTS_PER_RANKING)][::-1]
        return self._ranked.pop()

    def ranking(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return segments by what their loss costs: the least first, about equal ones in the order given.

        Each block costs its density, or the price of a move if it may move. A ranking also sets the densities and the
        price that `movable` uses: before the first ranking no block is worth a move.
        """
        self._densities = np.maximum(DENSITY_MIN, np.exp(np.array(self._density.level) / LEVELS))
        counts = self._counts(segments)
        self._price = MOVE_PRICE * (counts.sum(0) @ self._densities) / max(1, counts.sum())
        best_first = np.argsort(-self._densities, kind="stable")
        moved = np.minimum(counts[:, best_first].cumsum(1), RELOCATED_SHARE_MAX * counts.sum(1, keepdims=True))
        gained = np.maximum(0, self._densities[best_first] - self._price)
        lost = counts @ self._densities - np.diff(moved, axis=1, prepend=0) @ gained
        order = np.argsort(np.round(np.log(lost + DENSITY_MIN) / math.log(LOSS_RATIO)), kind="stable")
        return [segments[row] for row in order]

    def movable(self, table: EntryTable) -> list[int]:
        """Return the ordinals of blocks that are worth a move, as of the last ranking, the best first."""
        worth = self._densities[self._cells([table])]
        ordinals = np.flatnonzero(worth > self._price)
        best: list[int] = ordinals[np.argsort(-worth[ordinals], kind="stable")].tolist()
        return best

    @property
    def tick(self) -> int:
        """How often the time has advanced."""
        return self._ticks

    def ages(self, table: EntryTable) -> np.ndarray[Any, np.dtype[np.signedinteger[Any]]]:
        """Return the ticks since the last use of each block."""
        ages: np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
        ages = self._now - (np.array(table.states) >> _TICK_SHIFT) & _TICKS - 1
        return ages

    def best_first(self, table: EntryTable) -> np.ndarray[Any, np.dtype[np.intp]]:
        """Return the ordinals of all blocks, the best first, as of the last ranking."""
        return np.argsort(-self._densities[self._cells([table])], kind="stable")

    def _counts(self, segments: Sequence[Segment]) -> Table:
        """Return the number of blocks of each segment (rows) in each cell (columns)."""
        cells, counts = self._densities.size, []
        tables = [segment.table for segment in segments]  # a reset may replace one meanwhile
        lengths = list(map(len, tables))
        ends = np.cumsum(lengths)
        # Small segments are counted together: that is faster, and a ranking delays the store that waits for it.
        for _, group in groupby(range(len(segments)), lambda row: ends[row] // _BLOCKS_AT_ONCE):
            give_way()
            rows = list(group)
            first, end = rows[0], rows[-1] + 1
            places = np.repeat(range(end - first), lengths[first:end]) * cells
            places += self._cells(tables[first:end])
            counts.append(np.bincount(places, minlength=(end - first) * cells).reshape(-1, cells))
        return np.concatenate(counts)

    def _cells(self, tables: Sequence[EntryTable]) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """Return the cell of each block now, one table after the other. `HitDensity` numbers the cells."""
        states = np.concatenate([np.array(table.states) for table in tables])
        ages = np.minimum(self._now - (states >> _TICK_SHIFT) & _TICKS - 1, _AGES - 1)
        cells: np.ndarray[Any, np.dtype[np.uint16]] = (states & _USES_MASK) * BUCKETS + _BUCKET_ARRAY[ages]
        return cells

    def _slots(self, keys: Sequence[OffloadKey]) -> tuple[_Numbers, _Numbers]:
        """Return the digest of each key, and its slot in `_evicted`."""
        digests = np.fromiter(map(_digest, keys), np.uint64, len(keys))
        return digests, digests % len(self._evicted)

    def _note_return(self, state: int) -> int:
        """Count one more use of a block in `state`, and return its class of uses now."""
        uses, tick = state & _USES_MASK, state >> _TICK_SHIFT
        age = self._now - tick & _TICKS - 1
        if age < _AGES:
            bucket = _BUCKETS[age]
            self._density.hits[uses * BUCKETS + bucket] += 1
            if not bucket:
                self._density.seen[uses * BUCKETS] += 1
            self._last_uses[uses][tick % _AGES] -= 1
        return min(uses + 1, _USES_MASK)

    def _tick(self) -> None:
        """Advance by a tick. Count the blocks whose age reaches its next bucket."""
        self._ticks += 1
        self._now = self._ticks % _TICKS
        seen = self._density.seen
        for uses, last_uses in enumerate(self._last_uses):
            last_uses[self._now % _AGES] = 0
            for bucket, age in _FIRST_AGES[1:]:
                count = max(0, last_uses[(self._now - age) % _AGES])
                seen[uses * BUCKETS + bucket] += count
                if bucket == 1:
                    seen[uses * BUCKETS] += count
        self._density.learn()
