"""One segment: a large file that is filled from front to back with batches, and later used again."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from tiered_kv_nvme.layout import PAGE_BYTES, EntryTable, batch_header_bytes, pages, summary_bytes


class SegmentState(Enum):
    """The states of a segment, in the order of its life."""

    FREE = "free"  # its header is written, and it holds no batch
    ACTIVE = "active"  # a stream adds batches
    FULL = "full"  # no batch is added any more. Writes may be in flight, and it has no summary.
    SEALED = "sealed"  # its summary is written
    RECLAIMING = "reclaiming"  # its blocks are moved or evicted


@dataclass(frozen=True, slots=True)
class Demand:
    """The sizes of the blocks of a store, as sums of the first n at n - 1."""

    payload_ends: Sequence[int]
    key_ends: Sequence[int]

    @classmethod
    def of(cls, payload_bytes: Sequence[int], key_bytes: Sequence[int]) -> Demand:
        return cls(list(accumulate(payload_bytes)), list(accumulate(key_bytes)))

    def batch_bytes(self, count: int) -> int:
        header_bytes = batch_header_bytes(count, self.key_ends[count - 1])
        return header_bytes + pages(self.payload_ends[count - 1])


@dataclass(slots=True, eq=False)
class Segment:
    """A segment's file and state.

    All fields but `slot`, `fd` and `segment_bytes` belong to the pool and change under its lock. `renew` replaces
    `table` and does not empty it, so a reader may keep the old one.
    """

    slot: int  # the number in the file's name and in places
    fd: int
    segment_bytes: int
    generation: int  # of its present use
    damaged: bool = False  # the file is cut short, or the disk has failed in it: the reclaimer deletes it
    deleted: bool = False  # somebody has deleted the file, or moved it away; then it is damaged too
    age: int = 0  # when it became full; segments are sealed and reclaimed in this order
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
        self.generation = generation
        self.state = SegmentState.FREE
        self.epoch = 0
        self.table = EntryTable()
        self.end_offset = PAGE_BYTES
        self.sequence = 0
        self.reserved_blocks = 0
        self.key_bytes = 0

    def fit(self, demand: Demand) -> int:
        """Return how many blocks of `demand` the next batch of this segment can hold."""
        wanted = len(demand.payload_ends)
        if self._fits(demand, wanted):
            return wanted
        return bisect.bisect_left(range(1, wanted), True, key=lambda count: not self._fits(demand, count))

    def _fits(self, demand: Demand, count: int) -> bool:
        """Return whether `count` blocks fit before the segment's summary."""
        key_bytes = self.key_bytes + demand.key_ends[count - 1]
        end_offset = self.end_offset + demand.batch_bytes(count)
        return end_offset + summary_bytes(self.reserved_blocks + count, key_bytes) <= self.segment_bytes


def segment_bytes_min(stored_bytes: int, key_bytes: int, count: int) -> int:
    """Return the size of a segment for one batch of `count` blocks of at most `stored_bytes` each."""
    batch_bytes = batch_header_bytes(count, count * key_bytes) + pages(count * pages(stored_bytes))
    return PAGE_BYTES + batch_bytes + summary_bytes(count, count * key_bytes)
