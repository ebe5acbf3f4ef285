"""Segments: large files that are filled with batches from front to back, and later used again.

`SegmentPool` owns the state of each segment, under its lock. Recovery's threads call `SegmentFiles` first, then the
reclaimer's thread; any thread may call `write_header`. The files, with all foreign ones, stay within the capacity:
`create` refuses a file beyond it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from tiered_kv.system.file_systems import is_full, is_stuck
from tiered_kv.system.permissions import check_file
from tiered_kv.toolkit.codecs import ThreadBuffer
from tiered_kv.toolkit.small_files import write_all
from tiered_kv_nvme.directory import SEGMENT_RESERVE_BYTES, SegmentDirectory
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS, Disk, StoreCounters
from tiered_kv_nvme.layout import (
    PAGE_BYTES,
    EntryTable,
    SegmentHeader,
    Summary,
    batch_header_bytes,
    checksum,
    local_tenants,
    pages,
    summary_bytes,
)

LEFT_OUT_S = 600.0
"""How long no batch is written to a place that refused one. By then the disk may have replaced it, or got space."""


class SegmentState(Enum):
    """The states of a segment, in the order of its life."""

    FREE = "free"  # its header is written, and it holds no batch
    ACTIVE = "active"  # a stream adds batches
    FULL = "full"  # no batch is added any more. Writes may be in flight, and it has no summary.
    SEALED = "sealed"  # its summary is written
    RECLAIMING = "reclaiming"  # its blocks are moved or evicted


@dataclass(frozen=True, slots=True)
class Demand:
    """The sizes of a store's blocks in bytes, as running sums: item n - 1 is the sum of the first n."""

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
    generation: int  # the number of its present use
    damaged: bool = False  # the file is cut short, or could not be read at the opening: the reclaimer deletes it
    deleted: bool = False  # somebody has deleted the file, or moved it away; then it is damaged too
    is_copied: bool = False  # the file system copies overwritten pages: the reclaimer replaces the file
    age: int = 0  # when it became full; segments are sealed and reclaimed in this order
    writers: int = 0  # reservations that have not ended
    readers: int = 0  # pins
    refused_offset: int = 0  # where the disk refused a batch: the segment is filled no further; 0: nowhere
    refused_s: float = 0.0  # when the disk refused it, by `time.monotonic`
    alone_until_s: float = 0.0  # until then each block is read alone: there was no time to find a bad place
    state: SegmentState = field(init=False)
    epoch: int = field(init=False)  # of its blocks; 0: no valid block
    table: EntryTable = field(init=False)
    end_offset: int = field(init=False)  # where the next batch begins
    sequence: int = field(init=False)  # the next batch's number
    reserved_blocks: int = field(init=False)  # blocks written or reserved in this use
    key_bytes: int = field(init=False)  # of these blocks' keys
    table_checksum: bytes = field(init=False)  # of the summary on the disk; empty: it may have none
    held: dict[int, int] = field(init=False)  # with `limits`, bytes of its blocks by the tenant's number
    protected: dict[int, int] = field(init=False)  # as `held`: what has to stay, since it was chosen to be reclaimed
    tenant_names: Sequence[str] = ()  # as recovery found them: of the numbers in `table` from 1 on
    entry_more_bytes: int = 0  # what an entry takes of the summary besides itself and its key

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
        self.table_checksum = b""
        self.held, self.protected = {}, {}
        self.alone_until_s = 0.0

    @property
    def is_left_out(self) -> bool:
        """Whether a place in it refused a write, less than `LEFT_OUT_S` ago."""
        return self.refused_offset > 0 and time.monotonic() < self.refused_s + LEFT_OUT_S

    def may_hold(self, duration_s: float) -> bool:
        """Return whether the segment is worth filling.

        It is not for `duration_s` after a refused write, if less than a quarter of the segment lies before that place.
        """
        is_short = 0 < self.refused_offset < PAGE_BYTES + self.segment_bytes // 4
        return not is_short or time.monotonic() >= self.refused_s + duration_s

    def forget_refusal(self) -> None:
        """Let the next use try the whole segment, if its refusal is long ago or leaves too little."""
        if not (self.is_left_out and self.may_hold(math.inf)):
            self.refused_offset = 0

    def fit(self, demand: Demand) -> int:
        """Return how many blocks of `demand` the next batch of this segment can hold."""
        wanted = len(demand.payload_ends)
        if self._fits(demand, wanted):
            return wanted
        return bisect.bisect_left(range(1, wanted), True, key=lambda count: not self._fits(demand, count))

    def _fits(self, demand: Demand, count: int) -> bool:
        """Return whether `count` blocks fit before the segment's summary, and before a place that refused a batch."""
        blocks = self.reserved_blocks + count
        key_bytes = self.key_bytes + demand.key_ends[count - 1] + blocks * self.entry_more_bytes
        end_offset = self.end_offset + demand.batch_bytes(count)
        if end_offset > (self.refused_offset or end_offset):
            return False
        return end_offset + summary_bytes(blocks, key_bytes) <= self.segment_bytes


def segment_bytes_min(stored_bytes: int, key_bytes: int, count: int) -> int:
    """Return the size of a segment for one batch of `count` blocks of at most `stored_bytes` each."""
    batch_bytes = batch_header_bytes(count, count * key_bytes) + pages(count * pages(stored_bytes))
    return PAGE_BYTES + batch_bytes + summary_bytes(count, count * key_bytes)


class NoSegment(Enum):
    """Why no segment was created."""

    AT_CAPACITY = "at_capacity"
    NO_SPACE = "no_space"
    FAILED = "failed"


class Unlinked(Enum):
    """The outcome of the deletion of a file."""

    DONE = "done"
    STUCK = "stuck"  # this file cannot be deleted: it stays, and counts
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The segment files of a directory. Recovery's threads use it, later the reclaimer; any thread `write_header`."""

    disk: Disk
    directory: SegmentDirectory
    is_direct: bool  # whether to open them with O_DIRECT
    counters: StoreCounters
    segment_bytes: int  # the size of new files
    capacity_bytes: int  # the limit of the whole directory
    descriptors_max: int  # how many segment files may be open

    def create(self, taken: Set[int], generation: int, deleted_bytes: int) -> Segment | NoSegment:
        """Create and preallocate a free segment, in a slot that is not `taken`, if the capacity has room for it.

        `deleted_bytes` is the size of open files that are not in the directory any more.
        """
        slot = fd = -1
        flags = OPEN_FLAGS | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.is_direct else 0)
        try:
            listing = self.directory.list()
            wanted_bytes = self.segment_bytes + SEGMENT_RESERVE_BYTES
            if listing.claimed_bytes + deleted_bytes + wanted_bytes > self.capacity_bytes:
                return NoSegment.AT_CAPACITY
            used = taken | {*listing.segments}  # a file that could not be deleted is in no pool
            if len(used) >= self.descriptors_max:
                return NoSegment.AT_CAPACITY
            slot = next(slot for slot in itertools.count() if slot not in used)
            fd = os.open(self.directory.segment_name(slot), flags, FILE_MODE, dir_fd=self.directory.fd)
            self.disk.fallocate(fd, self.segment_bytes)
            segment = Segment(slot, fd, self.segment_bytes, generation, is_copied=self.directory.copies_on_write(fd))
            self.write_header(segment, generation)
            self.disk.datasync(fd)
        except OSError as error:
            self.counters.note_io_error("creating a segment file", error)
            if fd >= 0:
                os.close(fd)
                self.unlink(slot)
            if is_full(error):
                self.counters.add("no_space_errors_total")
                return NoSegment.NO_SPACE
            return NoSegment.FAILED
        return segment

    def excess_bytes(self) -> int:
        """Return the bytes by which the directory may exceed the capacity; negative if there is room."""
        return self.directory.list().claimed_bytes - self.capacity_bytes

    def open(self, slot: int) -> int:
        name = self.directory.segment_name(slot)
        flags = OPEN_FLAGS | os.O_NONBLOCK | (os.O_DIRECT if self.is_direct else 0)
        fd = os.open(name, flags, dir_fd=self.directory.fd)
        try:
            check_file(fd, name, any_owner=not self.directory.claimed.private)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def renew(self, segment: Segment, generation: int) -> bool:
        """Write and flush the header of the segment's next use; return whether that succeeded.

        The flush comes before any batch of the new generation, so the old summary is never read with new content.
        """
        try:
            self.write_header(segment, generation, segment.refused_offset)
            self.disk.datasync(segment.fd)
        except OSError as error:
            self.counters.note_io_error("reusing a segment file", error)
            return False
        return True

    def seal(self, segment: Segment, tenant_names: Sequence[str] = ()) -> bool:
        """Flush the batches of a full segment and write its summary; return whether that succeeded.

        The flush comes first, so that the listed blocks can be loaded after a power failure.
        A truncated file gets no summary: the write would extend the file, which would then look complete. The summary
        names the tenants of the blocks, if their names are given by number.
        """
        if segment.damaged:
            return False
        entries = segment.table  # a reset may replace it meanwhile
        numbers, names = local_tenants(entries, tenant_names)
        table_bytes = entries.table_bytes(len(numbers))
        if segment.end_offset + table_bytes + PAGE_BYTES > segment.segment_bytes:  # was filled without `limits`
            numbers = names = b""
            table_bytes = entries.table_bytes()
        if segment.end_offset + table_bytes + PAGE_BYTES > segment.segment_bytes:
            return False  # the file's header has a wrong, smaller size: a summary would overwrite payloads
        try:
            buffer = ThreadBuffer().take(table_bytes + PAGE_BYTES)
            entries.encode(buffer[:table_bytes], numbers)
            table_checksum = checksum(buffer[:table_bytes])
            Summary(
                table_bytes,
                len(entries),
                self.directory.identity.digest,
                segment.generation,
                segment.epoch,
                segment.sequence,
                segment.end_offset,
                segment.segment_bytes,
                table_checksum,
            ).encode(buffer[table_bytes:], names)
            self.disk.datasync(segment.fd)
            write_all(segment.fd, [buffer], segment.segment_bytes - len(buffer), pwritev=self.disk.pwritev)
        except OSError as error:
            self.counters.note_io_error("writing a summary", error)
            return False
        segment.table_checksum = table_checksum
        return True

    def delete(self, segment: Segment) -> None:
        try:
            os.close(segment.fd)
        except OSError as error:
            self.counters.note_io_error("closing a segment file", error)
        if self.unlink(segment.slot) is Unlinked.DONE:
            self.counters.add("deleted_segments_total")

    def discard(self, slot: int) -> None:
        """Delete a file without usable blocks."""
        self.unlink(slot)
        self.counters.add("discarded_segments_total")

    def unlink(self, slot: int) -> Unlinked:
        """Delete a file if it exists."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(self.directory.segment_name(slot), dir_fd=self.directory.fd)
        except OSError as error:
            self.counters.note_io_error("deleting a segment file", error)
            return Unlinked.STUCK if is_stuck(error) else Unlinked.FAILED
        return Unlinked.DONE

    def write_header(self, segment: Segment, generation: int, refused_offset: int = 0) -> None:
        """Write a segment's header, and do not flush it. The caller keeps the segment from being reclaimed meanwhile.

        Raises `OSError`.
        """
        page = ThreadBuffer().take(PAGE_BYTES)
        identity = self.directory.identity
        header = SegmentHeader(identity.digest, generation, segment.segment_bytes, identity.block_bytes, refused_offset)
        header.encode(page)
        write_all(segment.fd, [page], 0, pwritev=self.disk.pwritev)
