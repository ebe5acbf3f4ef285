"""One segment: a large file that is filled from front to back with batches, and later used again."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from tiered_kv_nvme.layout import PAGE_BYTES, EntryTable, batch_header_bytes, pages, summary_bytes


class SegmentState(Enum):
    """The state of a segment; it goes through these in a cycle."""

    FREE = "free"
    """Its header is written, and it holds no batch."""
    ACTIVE = "active"
    """Batches are being added; at most one segment of each stream is."""
    FULL = "full"
    """No batch is added any more. Batches may still be in flight, and it has no summary."""
    SEALED = "sealed"
    """Its summary is written."""
    RECLAIMING = "reclaiming"
    """Its blocks are moved or evicted."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The size of a batch, for every number of blocks that may fit."""

    payload_ends: Sequence[int]  # payload bytes of the first n blocks, at n - 1
    key_ends: Sequence[int]  # key bytes of the first n blocks, at n - 1

    @classmethod
    def of(cls, payload_bytes: Sequence[int], key_bytes: Sequence[int]) -> Demand:
        """Return the demand of blocks of these sizes."""
        return cls(list(accumulate(payload_bytes)), list(accumulate(key_bytes)))

    def batch_bytes(self, count: int) -> int:
        """Return the size of a batch of the first `count` blocks."""
        header_bytes = batch_header_bytes(count, self.key_ends[count - 1])
        return header_bytes + pages(self.payload_ends[count - 1])


@dataclass(slots=True, eq=False)
class Segment:
    """A segment's file and state.

    All fields but `slot`, `fd` and `segment_bytes` belong to the pool and change under its lock. When the segment is
    used again, `table` is replaced and not emptied, so a reader may keep the old one. `slot` is the number in its
    file's name and in index entries, `generation` that of its current use.
    """

    slot: int
    fd: int
    segment_bytes: int
    generation: int
    damaged: bool = False
    """Whether it is given up when it is reclaimed: its file is cut short, or the disk has failed in it."""
    age: int = 0
    """When it was filled: the order in which segments are sealed and reclaimed."""
    writers: int = 0
    readers: int = 0
    state: SegmentState = field(init=False)
    epoch: int = field(init=False)
    table: EntryTable = field(init=False)
    end_offset: int = field(init=False)
    sequence: int = field(init=False)
    reserved_blocks: int = field(init=False)
    key_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.renew(self.generation)

    def renew(self, generation: int) -> None:
        """Make it empty, for its next use."""
        self.generation = generation
        self.state = SegmentState.FREE
        self.epoch = 0
        self.table = EntryTable()
        self.end_offset = PAGE_BYTES
        self.sequence = 0
        self.reserved_blocks = 0
        self.key_bytes = 0

    def fit(self, demand: Demand) -> int:
        """Return how many blocks of `demand` a batch at the end of this segment can hold."""
        wanted = len(demand.payload_ends)
        if self._fits(demand, wanted):
            return wanted
        return bisect.bisect_left(range(1, wanted), True, key=lambda count: not self._fits(demand, count))

    def _fits(self, demand: Demand, count: int) -> bool:
        """Return whether `count` blocks fit, and the summary of everything after them."""
        key_bytes = self.key_bytes + demand.key_ends[count - 1]
        end_offset = self.end_offset + demand.batch_bytes(count)
        return end_offset + summary_bytes(self.reserved_blocks + count, key_bytes) <= self.segment_bytes


def segment_bytes_min(stored_bytes: int, key_bytes: int, count: int) -> int:
    """Return the size of a segment that holds `count` blocks of at most `stored_bytes` in one batch."""
    batch_bytes = batch_header_bytes(count, count * key_bytes) + pages(count * pages(stored_bytes))
    return PAGE_BYTES + batch_bytes + summary_bytes(count, count * key_bytes)
