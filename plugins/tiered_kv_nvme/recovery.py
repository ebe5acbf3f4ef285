"""Recovery: rebuilds the index from segment files, by their summaries, and batch by batch where there is no summary.

The store calls it while it opens its directory, before any job. Several threads read the files, one thread fills the
pool. Each byte of a batch without a summary is verified. A file that cannot be used is deleted, and a file that exceeds
the capacity too. docs/reference/formats-nvme.md has the rules ("Reading a directory").
"""

from __future__ import annotations

import errno
import os
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tiered_kv.cpu.key_hashes import key_hashes
from tiered_kv.cpu.key_table import KeyTable
from tiered_kv.system.file_systems import is_of_place, is_stuck
from tiered_kv.system.heap import give_back_free_memory
from tiered_kv.system.permissions import NotPrivateError
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.codecs import OVERHEAD_BYTES_MAX, ThreadBuffer
from tiered_kv.toolkit.small_files import read_all
from tiered_kv_nvme.disk import Disk, StoreCounters
from tiered_kv_nvme.index import place_of, slot_of
from tiered_kv_nvme.layout import (
    PAGE_BYTES,
    BatchHeader,
    EntryTable,
    Hashes,
    Rows,
    SegmentHeader,
    Summary,
    checksum,
    decode_names,
)
from tiered_kv_nvme.pool import SegmentPool
from tiered_kv_nvme.saved_index import SavedIndex, take_index
from tiered_kv_nvme.segment import Segment, SegmentFiles, SegmentState


def recover(files: SegmentFiles, pool: SegmentPool, *, threads: int) -> bool:
    """Fill an empty pool and its index from the directory; delete unusable segments, and segments over the capacity.

    Returns whether the index is the one that the last end has saved.

    Raises `OSError`: a segment file cannot be opened, or there is no memory to read it; no file is left open.
    """
    saved = take_index(files, pool.epoch)
    with ExitStack() as closing:
        if saved is not None:
            closing.callback(saved.close)
        return _recover(files, pool, saved, threads)


def _recover(files: SegmentFiles, pool: SegmentPool, saved: SavedIndex | None, threads: int) -> bool:
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
        index = None if saved is None else saved.index_of(found, threads)
        _adopt(found, pool, _index_of(found, threads) if index is None else index)
    except BaseException:
        for segment in found:
            os.close(segment.fd)
        raise
    give_back_free_memory()  # keys that only the index has now
    files.counters.add("recovered_blocks_total", count=len(pool.index.places))
    return index is not None


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


def _adopt(found: Sequence[Segment], pool: SegmentPool, index: tuple[KeyTable, dict[int, Hashes]]) -> None:
    """Add segments, the oldest first; stores continue in the newest that has blocks."""
    pool.worth.restart([segment.table for segment in found])
    places, hashes = index
    resumable: Segment | None = None
    with pool.changed:
        pool.index.use(places)
        for segment in found:
            pool.adopt(segment)
            if pool.shares is None:
                segment.table.tenants = array("H")
            else:
                pool.shares.adopt(segment)
            if len(segment.table) and not (segment.damaged or segment.is_copied or segment.refused_offset):
                resumable = segment
        if resumable is not None:
            pool.resume(resumable)
        for segment in found:
            if segment.state is SegmentState.SEALED and segment.slot in hashes:
                segment.table.forget_keys(hashes[segment.slot])


def _index_of(found: Sequence[Segment], threads: int) -> tuple[KeyTable, dict[int, Hashes]]:
    """Return the index of segments, the oldest first: of equal keys the last one counts.

    Keys of the most frequent length enter it together, and the few others one by one. The hashes of the former are
    returned by slot: their segments may forget them.
    """
    rows_of = {segment.slot: rows for segment in found if (rows := segment.table.key_rows) is not None}
    counts = Counter[int]()
    for rows in rows_of.values():
        counts[rows.shape[1]] += len(rows)
    most = max(counts, key=counts.__getitem__, default=0)
    alike = {slot: rows for slot, rows in rows_of.items() if rows.shape[1] == most}
    places, hashes = _table_of(alike, most, threads) if alike else (KeyTable(), {})
    age = {segment.slot: number for number, segment in enumerate(found)}
    for segment in found:
        if segment.slot not in alike:
            keys = segment.table.keys()
            for ordinal, (key, place) in enumerate(zip(keys, places.get_many(keys), strict=True)):
                if place < 0 or age[slot_of(place)] <= age[segment.slot]:
                    places.set(key, place_of(segment.slot, ordinal))
    return places, hashes


def _table_of(rows_of: Mapping[int, Rows], key_bytes: int, threads: int) -> tuple[KeyTable, dict[int, Hashes]]:
    """Return a table of the keys of segments, given by slot, the oldest first; and the hashes of each segment's keys.

    Threads copy the keys of all segments together. Meanwhile numpy does not hold the interpreter's lock.
    """
    count = sum(map(len, rows_of.values()))
    starts = accumulate(map(len, rows_of.values()), initial=0)
    parts = {
        slot: slice(start, start + len(rows)) for (slot, rows), start in zip(rows_of.items(), starts, strict=False)
    }
    keys, places, hashes = (
        np.empty((count, key_bytes), np.uint8),
        np.empty(count, np.uint64),
        np.empty(count, np.uint32),
    )

    def copy(slot: int) -> None:
        part, rows = parts[slot], rows_of[slot]
        keys[part], hashes[part] = rows, key_hashes(rows)
        places[part] = np.arange(len(rows), dtype=np.uint64) + np.uint64(place_of(slot, 0))

    for copied in run_all(copy, rows_of, "tiered-kv-nvme-recovery", threads):
        copied.result()
    table = KeyTable.build(keys, places, hashes=hashes, threads=threads)
    return table, {slot: hashes[part].copy() for slot, part in parts.items()}


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
    """Reads segment files. One thread at a time.

    For each segment that `read` returns:

    - `table` has only blocks of `epoch`, in the order of their writing. An intact summary lists them, or their batch
      was verified whole.
    - The batches of `table` lie before `end_offset`, and have the sequences below `sequence`. So the next batch follows
      a scan's end, and a summary that is written now lists what a later scan finds.
    - `epoch` is 0 if the segment holds no block, and may be used at once. It is the directory's if the segment has
      blocks, or is damaged: then it may have some that this scan could not read. Any other value is from before a
      reset: no block is valid.
    - `state` is FREE if `epoch` is 0 and no place refused a write; SEALED if the summary on the disk lists all of
      `table`, or there is nothing to list; FULL if a summary has yet to be written.
    - `damaged` is set if the file is shorter than its header says, or a read failed. No batch and no summary is then
      written to it: they could make what a later scan reads inconsistent.
    - `reserved_blocks` and `key_bytes` are those of `table`. They keep room for the summary.
    """

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
        is_sealed = False
        try:
            if not self._read_header(segment):
                return None
            summary = self._summary_or_none(segment)
            if summary is not None and summary.epoch != self.epoch:
                segment.epoch, segment.state = summary.epoch, SegmentState.SEALED
                return segment
            batches = self._read_batches(segment)
            is_sealed = summary is not None and not batches
            # If the summary can be read later, it must not list batches that were overwritten meanwhile.
            segment.damaged |= self.failure is not None and not batches
        except OSError as error:
            if error.errno == errno.ENOMEM:  # not the fault of the file
                raise
            self._note(error)
            segment.damaged = True
        self._settle(segment, is_sealed)
        return segment

    def _summary_or_none(self, segment: Segment) -> Summary | None:
        """Fill the segment from its summary; None without an intact one, or if it lies at a bad place."""
        try:
            return self._read_summary(segment)
        except OSError as error:
            if not is_of_place(error):
                raise
            self._note(error)
            return None  # the batches have the same entries

    def _settle(self, segment: Segment, is_sealed: bool) -> None:
        """Set the fields that follow from what was read; see the class."""
        if len(segment.table) or segment.damaged:
            segment.epoch = self.epoch
            segment.state = SegmentState.SEALED if is_sealed else SegmentState.FULL
        if segment.refused_offset:
            segment.refused_s = time.monotonic()
            segment.state = SegmentState.SEALED if is_sealed or not len(segment.table) else SegmentState.FULL
        segment.reserved_blocks = len(segment.table)
        segment.key_bytes = segment.table.key_bytes

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
        names = [] if page is None or summary is None else decode_names(page)
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
        entries = EntryTable.decode(
            table, summary.entry_count, self._stored_bytes_max, summary.end_offset, has_tenants=bool(names)
        )
        if entries is None:
            return None
        segment.end_offset = summary.end_offset
        segment.sequence = summary.sequence
        segment.table_checksum = summary.table_checksum
        if summary.epoch == self.epoch:
            segment.table, segment.tenant_names = entries, names
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
