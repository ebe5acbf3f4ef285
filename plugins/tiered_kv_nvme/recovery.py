"""Recovery: rebuilds the index from segment files, by their summaries, and batch by batch where there is no summary.

The store calls it while it opens its directory, before any job. Several threads read the files, one thread fills the
pool. Each byte of a batch without a summary is verified. A file that cannot be used is deleted, and a file that exceeds
the capacity too. docs/reference/formats-nvme.md has the rules ("Reading a directory").
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_kv.system.file_systems import is_of_place, is_stuck
from tiered_kv.system.permissions import NotPrivateError
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.codecs import OVERHEAD_BYTES_MAX, ThreadBuffer
from tiered_kv.toolkit.small_files import read_all
from tiered_kv_nvme.disk import Disk, StoreCounters
from tiered_kv_nvme.layout import PAGE_BYTES, BatchHeader, EntryTable, SegmentHeader, Summary, checksum
from tiered_kv_nvme.pool import SegmentPool, place_of
from tiered_kv_nvme.segment import Segment, SegmentFiles, SegmentState


def recover(files: SegmentFiles, pool: SegmentPool, *, threads: int) -> None:
    """Fill an empty pool and its index from the directory; delete unusable segments, and segments over the capacity.

    Raises `OSError`: a segment file cannot be opened, or there is no memory to read it; no file is left open.
    """
    slots = files.directory.list().segments
    if len(slots) > files.descriptors_max:
        slots = _newest(files, slots)
    scans = run_all(lambda slot: _recover_segment(files, slot, pool.epoch), slots, "tiered-kv-nvme-recovery", threads)
    segments = [scan.result() for scan in scans if scan.exception() is None]
    found = [segment for segment in segments if segment is not None]
    try:
        for scan in scans:
            scan.result()  # raises the first error
        # Segments over the capacity go in this order: free ones (epoch 0), ones from before a reset, the oldest.
        found.sort(key=lambda each: (each.epoch == pool.epoch, each.epoch > 0, each.generation))
        while found and files.excess_bytes() > 0:
            files.delete(found.pop(0))
            files.counters.add("discarded_segments_total")
        _adopt(found, pool)
    except BaseException:
        for segment in found:
            os.close(segment.fd)
        raise
    files.counters.add("recovered_blocks_total", count=len(pool.places))


def _newest(files: SegmentFiles, slots: Sequence[int]) -> list[int]:
    """Delete the files beyond the number that may be open: first the files that were written least recently."""
    folder = files.directory
    written_ns = {
        slot: os.stat(folder.segment_name(slot), dir_fd=folder.fd, follow_symlinks=False).st_mtime_ns for slot in slots
    }
    by_age = sorted(slots, key=written_ns.__getitem__)
    for slot in by_age[: -files.descriptors_max]:
        files.discard(slot)
    return by_age[-files.descriptors_max :]


def _adopt(found: Sequence[Segment], pool: SegmentPool) -> None:
    """Add segments, the oldest first; stores continue in the newest that has blocks."""
    resumable: Segment | None = None
    pool.worth.restart([segment.table for segment in found])
    with pool.changed:
        for segment in found:
            pool.adopt(segment)
            pool.add(segment.table.keys, place_of(segment.slot, 0))
            if len(segment.table) and not (segment.damaged or segment.is_copied or segment.refused_offset):
                resumable = segment
        if resumable is not None:
            pool.resume(resumable)


def _recover_segment(files: SegmentFiles, slot: int, epoch: int) -> Segment | None:
    """Return the segment in `slot`; delete an unusable file and return None."""
    try:
        fd = files.open(slot)
    except OSError as error:
        if is_stuck(error) and not isinstance(error, NotPrivateError):
            files.counters.note_io_error("opening a segment file", error)
            return None  # an immutable file: it stays, and counts
        if error.errno != errno.ELOOP:  # for example, too many open files
            raise
        files.discard(slot)  # a symbolic link
        return None
    try:
        segment = SegmentScan(files.disk, files.directory.identity, epoch, files.counters).read(fd, slot)
    except BaseException:
        os.close(fd)
        raise
    if segment is not None:
        segment.is_copied = files.directory.copies_on_write(fd)
        if not segment.is_copied or segment.state is not SegmentState.FREE:
            return segment
    os.close(fd)
    files.discard(slot)
    return None


@dataclass(eq=False)
class SegmentScan:
    """Reads segment files. One thread at a time."""

    disk: Disk
    identity: Identity
    epoch: int
    counters: StoreCounters
    checks_payloads: bool = True  # of batches without a summary; if False, incomplete batches of a crash count

    def __post_init__(self) -> None:
        self._stored_bytes_max = self.identity.block_bytes + OVERHEAD_BYTES_MAX
        self._scratch = ThreadBuffer()
        self._file_bytes = 0  # of the file that `read` reads
        self.failure: OSError | None = None
        """Why the last segment, or its summary, could not be read to its end."""

    def read(self, fd: int, slot: int) -> Segment | None:
        """Return the segment in an open file, with its readable blocks; None without an intact header.

        A summary at a bad place counts as none. After another read error the segment is damaged, and keeps the blocks
        read so far. No batch is written to the segment again, so the next opening may find the rest.
        """
        self._file_bytes, self.failure = os.fstat(fd).st_size, None
        segment = Segment(slot, fd, self._file_bytes, 0)
        try:
            if not self._read_header(segment):
                return None
            try:
                summary = self._read_summary(segment)
            except OSError as error:
                if not is_of_place(error):
                    raise
                self._note(error)
                summary = None  # the batches have the same entries
            if summary is not None and summary.epoch != self.epoch:
                segment.epoch = summary.epoch
                segment.state = SegmentState.SEALED
                return segment
            batches = self._read_batches(segment)
            is_sealed = summary is not None and not batches
            # If the summary can be read later, it must not list batches that were overwritten meanwhile.
            segment.damaged |= self.failure is not None and not batches
        except OSError as error:
            if error.errno == errno.ENOMEM:  # not the fault of the file
                raise
            self._note(error)
            segment.damaged, is_sealed = True, False
        if len(segment.table) or segment.damaged:
            segment.epoch = self.epoch
            segment.state = SegmentState.SEALED if is_sealed else SegmentState.FULL
        if segment.refused_offset:
            segment.refused_s = time.monotonic()
            segment.state = SegmentState.SEALED if is_sealed or not len(segment.table) else SegmentState.FULL
        segment.reserved_blocks = len(segment.table)
        segment.key_bytes = sum(map(len, segment.table.keys))
        return segment

    def _note(self, error: OSError) -> None:
        self.counters.note_io_error("recovering a segment file", error)
        self.failure = error

    def _read_header(self, segment: Segment) -> bool:
        """Set the segment's fields from its header; return False if it has no intact one."""
        page = self._read_page(segment, 0)
        header = None if page is None else SegmentHeader.decode(page)
        identity = self.identity
        if header is None or (header.digest, header.block_bytes) != (identity.digest, identity.block_bytes):
            return False
        segment.segment_bytes, segment.generation = header.segment_bytes, header.generation
        segment.refused_offset = header.refused_offset
        segment.damaged = self._file_bytes < header.segment_bytes
        return True

    def _read_summary(self, segment: Segment) -> Summary | None:
        """Fill the segment from its summary; return None if it has no intact one."""
        footer_offset = segment.segment_bytes - PAGE_BYTES
        page = self._read_page(segment, footer_offset)
        summary = None if page is None else Summary.decode(page)
        if (
            summary is None
            or summary.digest != self.identity.digest
            or summary.generation != segment.generation
            or summary.segment_bytes != segment.segment_bytes
            or summary.table_bytes > footer_offset
        ):
            return None
        table = self._scratch.take(summary.table_bytes)
        read_bytes = read_all(segment.fd, [table], footer_offset - summary.table_bytes, preadv=self.disk.preadv)
        if read_bytes != len(table) or checksum(table) != summary.table_checksum:
            return None
        entries = EntryTable.decode(table, summary.entry_count, self._stored_bytes_max, summary.end_offset)
        if entries is None:
            return None
        segment.end_offset = summary.end_offset
        segment.sequence = summary.sequence
        if summary.epoch == self.epoch:
            segment.table = entries
        return summary

    def _read_page(self, segment: Segment, offset: int) -> memoryview | None:
        page = self._scratch.take(PAGE_BYTES)
        return page if read_all(segment.fd, [page], offset, preadv=self.disk.preadv) == PAGE_BYTES else None

    def _read_batches(self, segment: Segment) -> int:
        """Add the batches that are not in the summary; return their number."""
        first_sequence = segment.sequence
        limit = segment.refused_offset or segment.segment_bytes  # no batch can be read behind a place that refused one
        while segment.end_offset + PAGE_BYTES <= limit:
            batch = self._read_batch(segment)
            if batch is None:
                break
            header, entries = batch
            segment.table.extend(entries)
            segment.end_offset += header.batch_bytes
            segment.sequence += 1
        return segment.sequence - first_sequence

    def _read_batch(self, segment: Segment) -> tuple[BatchHeader, EntryTable] | None:
        """Return the verified batch at the segment's end; None if there is none."""
        offset = segment.end_offset
        page = self._read_page(segment, offset)
        header = None if page is None else BatchHeader.peek(page)
        if header is None or not self._follows(header, segment):
            return None
        batch = self._scratch.take(header.batch_bytes if self.checks_payloads else header.header_bytes)
        batch = batch[: read_all(segment.fd, [batch], offset, preadv=self.disk.preadv)]
        if len(batch) < header.header_bytes:
            return None
        entries = header.decode_entries(batch[: header.header_bytes], self._stored_bytes_max)
        if entries is None or (self.checks_payloads and not _all_sound(batch, entries, offset)):
            return None
        return header, entries

    def _follows(self, header: BatchHeader, segment: Segment) -> bool:
        """Return whether an unverified header belongs to the segment's next batch."""
        room_bytes = min(segment.segment_bytes, self._file_bytes) - segment.end_offset
        return (
            header.digest == self.identity.digest
            and header.generation == segment.generation
            and header.epoch == self.epoch
            and header.sequence == segment.sequence
            and header.offset == segment.end_offset
            and 0 < header.header_bytes <= header.batch_bytes <= room_bytes
            and header.header_bytes % PAGE_BYTES == header.batch_bytes % PAGE_BYTES == 0
        )


def _all_sound(batch: memoryview, entries: EntryTable, offset: int) -> bool:
    """Return whether every payload of a batch read from `offset` is complete and matches its checksum."""
    for ordinal in range(len(entries)):
        entry = entries[ordinal]
        at = entry.offset - offset
        payload = batch[at : at + entry.stored_bytes] if at >= 0 else batch[:0]
        if len(payload) != entry.stored_bytes or checksum(payload) != entry.checksum:
            return False
    return True
