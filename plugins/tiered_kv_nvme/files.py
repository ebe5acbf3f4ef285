"""Segment files: create, open, renew, seal and delete them."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from tiered_kv.permissions import check_file
from tiered_kv.toolkit.codecs import ThreadBuffer
from tiered_kv.toolkit.small_files import write_all
from tiered_kv_nvme.directory import SEGMENT_RESERVE_BYTES, SegmentDirectory
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS, Disk, StoreCounters
from tiered_kv_nvme.layout import PAGE_BYTES, SegmentHeader, Summary, checksum, pages
from tiered_kv_nvme.segment import Segment


class NoSegment(Enum):
    AT_CAPACITY = "at_capacity"
    NO_SPACE = "no_space"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The segment files of a directory. Recovery's threads use it, later the reclaimer alone."""

    disk: Disk
    directory: SegmentDirectory
    is_direct: bool  # whether to open them with O_DIRECT
    counters: StoreCounters
    segment_bytes: int  # of new files
    capacity_bytes: int  # of the whole directory
    descriptors_max: int  # for segments

    def create(self, taken: Set[int], generation: int, deleted_bytes: int) -> Segment | NoSegment:
        """Create and preallocate a free segment, in a slot that is not `taken`, if the capacity has room for it.

        `deleted_bytes` are those of open files that are not in the directory any more.
        """
        slot = fd = -1
        flags = OPEN_FLAGS | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.is_direct else 0)
        try:
            listing = self.directory.list()
            wanted_bytes = self.segment_bytes + SEGMENT_RESERVE_BYTES
            if listing.claimed_bytes + deleted_bytes + wanted_bytes > self.capacity_bytes:
                return NoSegment.AT_CAPACITY
            used = taken | {*listing.segments}  # files in no pool are those whose deletion failed
            if len(used) >= self.descriptors_max:
                return NoSegment.AT_CAPACITY
            slot = next(slot for slot in itertools.count() if slot not in used)
            fd = os.open(self.directory.segment_name(slot), flags, FILE_MODE, dir_fd=self.directory.fd)
            self.disk.fallocate(fd, self.segment_bytes)
            segment = Segment(slot, fd, self.segment_bytes, generation)
            self._write_header(segment, generation)
        except OSError as error:
            self.counters.note_io_error("creating a segment file", error)
            if fd >= 0:
                os.close(fd)
                self.unlink(slot)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
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
            self._write_header(segment, generation)
        except OSError as error:
            self.counters.note_io_error("reusing a segment file", error)
            return False
        return True

    def seal(self, segment: Segment) -> bool:
        """Flush the batches of a full segment and write its summary; return whether that succeeded.

        The flush comes first, so that the listed blocks can be loaded after a power failure.
        A truncated file gets no summary: the write would extend the file, which would then look complete.
        """
        if segment.damaged:
            return False
        table = segment.table.encode()
        table_bytes = pages(len(table))
        if segment.end_offset + table_bytes + PAGE_BYTES > segment.segment_bytes:
            return False  # the file's header has a wrong, smaller size: a summary would overwrite payloads
        try:
            buffer = ThreadBuffer().take(table_bytes + PAGE_BYTES)
            buffer[: len(table)] = table
            buffer[len(table) : table_bytes] = bytes(table_bytes - len(table))
            Summary(
                table_bytes,
                len(segment.table),
                self.directory.identity.digest,
                segment.generation,
                segment.epoch,
                segment.sequence,
                segment.end_offset,
                segment.segment_bytes,
                checksum(buffer[:table_bytes]),
            ).encode(buffer[table_bytes:])
            self.disk.datasync(segment.fd)
            write_all(segment.fd, [buffer], segment.segment_bytes - len(buffer), pwritev=self.disk.pwritev)
        except OSError as error:
            self.counters.note_io_error("writing a summary", error)
            return False
        return True

    def delete(self, segment: Segment) -> None:
        try:
            os.close(segment.fd)
        except OSError as error:
            self.counters.note_io_error("closing a segment file", error)
        if self.unlink(segment.slot):
            self.counters.add("deleted_segments_total")

    def discard(self, slot: int) -> None:
        """Delete a file without usable blocks."""
        self.unlink(slot)
        self.counters.add("discarded_segments_total")

    def unlink(self, slot: int) -> bool:
        """Delete a file if it exists; return whether that succeeded."""
        try:
            with suppress(FileNotFoundError):
                os.unlink(self.directory.segment_name(slot), dir_fd=self.directory.fd)
        except OSError as error:
            self.counters.note_io_error("deleting a segment file", error)
            return False
        return True

    def _write_header(self, segment: Segment, generation: int) -> None:
        page = ThreadBuffer().take(PAGE_BYTES)
        identity = self.directory.identity
        header = SegmentHeader(identity.digest, generation, segment.segment_bytes, identity.block_bytes)
        header.encode(page)
        write_all(segment.fd, [page], 0, pwritev=self.disk.pwritev)
        self.disk.datasync(segment.fd)
