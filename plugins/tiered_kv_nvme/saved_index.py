"""The saved index: a file that a clean end leaves, so that the next opening need not build the index from all keys.

`SegmentStore.close` saves it, when no other thread uses the directory. The next opening takes it before it reads the
segments, and uses it after; several threads read it. docs/reference/formats-nvme.md describes the file.

What must stay true:

- An opening deletes the file before the tier serves. So no process ever meets one from before a crash.
- It is used whole or not at all: if each segment has the use and the summary that the file names, each part has its
  checksum, and each record is in its bucket and names another entry. So a block in it is one that a summary lists.
- It is within the capacity, and saved in a bounded time. Without it, an opening builds the index from the segments.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cpu.key_hashes import bucket_indexes, key_hashes
from tiered_kv.cpu.key_table import KeyTable, TablePart
from tiered_kv.system.permissions import NotPrivateError, check_file
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.codecs import ThreadBuffer
from tiered_kv.toolkit.small_files import read_all, write_all
from tiered_kv_nvme.directory import INDEX_NAME
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS
from tiered_kv_nvme.layout import KEY_BYTES_MAX, PAGE_BYTES, Hashes, checksum, pages
from tiered_kv_nvme.segment import Segment, SegmentFiles, SegmentState, Unlinked
from tiered_kv_nvme.sizing import SEGMENTS_MAX

SAVE_S = 1.5
"""How long saving may take: less than the time that a tier has for its end."""
_FORMAT_VERSION = 1
_PART_BUCKETS = 1 << 14  # some 6 MB
_NUMBER_BYTES = 8

_MAGIC = b"TKVNIDX1"
_PROLOGUE = struct.Struct("<8s16s")  # magic, checksum of the header's bytes behind it
_HEADER = struct.Struct("<II16sQQQIII")
_USE = struct.Struct("<IIQ16s")
_PART = struct.Struct("<Q16s")

Starts = NDArray[np.int64]


class Use(NamedTuple):
    """A segment's use, as its header and its summary have it."""

    slot: int
    entry_count: int
    generation: int
    table_checksum: bytes  # of its summary


class Header(NamedTuple):
    """The fields before the uses of segments and the checksums of parts."""

    header_bytes: int  # whole pages
    digest: bytes
    """The digest of the namespace."""
    epoch: int
    key_count: int
    bucket_count: int
    key_bytes: int  # of one key
    use_count: int
    part_count: int


def uses_of(segments: Sequence[Segment], epoch: int) -> list[Use] | None:
    """Return the uses of the segments that hold blocks; None if one has no summary of all its blocks."""
    holding = [segment for segment in segments if len(segment.table) and segment.epoch == epoch]
    if any(segment.damaged or segment.state is not SegmentState.SEALED for segment in holding):
        return None
    uses = (Use(each.slot, len(each.table), each.generation, each.table_checksum) for each in holding)
    return sorted(uses)


def _starts(uses: Sequence[Use]) -> tuple[Starts, Starts]:
    """Return, by slot, where the entries of a segment begin if all are counted one after another, and their number."""
    counts = np.zeros(max((use.slot for use in uses), default=0) + 1, np.int64)
    for use in uses:
        counts[use.slot] = use.entry_count
    return np.cumsum(counts) - counts, counts


# Saving.


def save_index(files: SegmentFiles, segments: Sequence[Segment], places: KeyTable, epoch: int, end_s: float) -> bool:
    """Save an index that nobody changes any more, of segments that nobody uses; return whether that succeeded.

    If the capacity has no room for the file, free segments are deleted: the next opening makes them again.

    Args:
        files: The directory's, whose lock this process holds.
        segments: All segments of the directory.
        places: The index.
        epoch: The directory's.
        end_s: When it must have ended, by `time.monotonic`. `SAVE_S` limits it too.
    """
    began_s = time.monotonic()
    end_s = min(end_s, began_s + SAVE_S)
    uses, part_count = uses_of(segments, epoch), places.part_count(_PART_BUCKETS)
    if began_s >= end_s or not uses or not part_count or len(uses) > SEGMENTS_MAX:
        return False
    hashes = _hashes_of(segments, uses, places.key_bytes)
    if hashes is None:
        return False
    # Where the file system has no fallocate(2), the next opening would fill new segments with zeros.
    free = [each for each in segments if each.state is SegmentState.FREE and not files.disk.writes_zeros]
    header_bytes = _header_bytes(len(uses), part_count)
    record_bytes = places.key_bytes + _NUMBER_BYTES + hashes.itemsize
    size_bytes = pages(header_bytes + places.bucket_count + len(places) * record_bytes)
    directory = files.directory
    try:
        if not _has_room(files, free, size_bytes):
            return False
        with suppress(FileNotFoundError):
            os.unlink(INDEX_NAME, dir_fd=directory.fd)
        fd = os.open(INDEX_NAME, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, FILE_MODE, dir_fd=directory.fd)
    except OSError as error:
        files.counters.note_io_error("saving the index", error)
        return False
    is_saved = False
    try:
        header = Header(
            header_bytes,
            directory.identity.digest,
            epoch,
            len(places),
            places.bucket_count,
            places.key_bytes,
            len(uses),
            part_count,
        )
        is_saved = _write(fd, files, header, uses, places, hashes, began_s, end_s)
    except OSError as error:
        files.counters.note_io_error("saving the index", error)
    finally:
        os.close(fd)
        if not is_saved:
            with suppress(OSError):
                os.unlink(INDEX_NAME, dir_fd=directory.fd)
    return is_saved


def _hashes_of(segments: Sequence[Segment], uses: Sequence[Use], key_bytes: int) -> Hashes | None:
    """Return the hashes of all entries, in the order of `uses`; None if a segment has keys of another length."""
    tables = {segment.slot: segment.table for segment in segments}
    columns: list[Hashes] = []
    for use in uses:
        table = tables[use.slot]
        hashes, rows = table.hashes, None if table.hashes is not None else table.key_rows
        if rows is not None and rows.shape[1] == key_bytes:
            hashes = key_hashes(rows)
        if hashes is None:
            return None
        columns.append(hashes)
    return np.concatenate(columns)


def _has_room(files: SegmentFiles, free: list[Segment], size_bytes: int) -> bool:
    """Return whether the capacity has room for the file, perhaps in place of free segments, which are deleted."""
    excess_bytes = files.excess_bytes() + size_bytes
    if excess_bytes > sum(segment.segment_bytes for segment in free):
        return False
    while excess_bytes > 0:
        segment = free.pop()
        if files.unlink(segment.slot) is not Unlinked.DONE:
            return False
        excess_bytes -= segment.segment_bytes
    return True


def _write(
    fd: int,
    files: SegmentFiles,
    header: Header,
    uses: Sequence[Use],
    places: KeyTable,
    hashes: Hashes,
    began_s: float,
    end_s: float,
) -> bool:
    """Write all parts, and the header last; return False as soon as the time would not suffice."""
    starts, counts = _starts(uses)
    offset, written = header.header_bytes, list[bytes]()
    for number, part in enumerate(places.parts(_PART_BUCKETS)):
        rows = _rows(part, header.key_bytes, starts, counts)
        if rows is None:
            return False
        content = b"".join((part.sizes, part.records, hashes[rows].astype("<u4").tobytes()))
        write_all(fd, [content], offset, pwritev=files.disk.pwritev)
        offset += len(content)
        written.append(_PART.pack(len(content), checksum(content)))
        passed_s = time.monotonic() - began_s
        if passed_s * header.part_count > (end_s - began_s) * (number + 1):
            return False
    body = b"".join((_HEADER.pack(_FORMAT_VERSION, *header), *(_USE.pack(*use) for use in uses), *written))
    body = body.ljust(header.header_bytes - _PROLOGUE.size, b"\0")
    write_all(fd, [_PROLOGUE.pack(_MAGIC, checksum(body)), body], 0, pwritev=files.disk.pwritev)
    return True


def _header_bytes(use_count: int, part_count: int) -> int:
    return pages(_PROLOGUE.size + _HEADER.size + use_count * _USE.size + part_count * _PART.size)


def _rows(part: TablePart, key_bytes: int, starts: Starts, counts: Starts) -> Starts | None:
    """Return the number of each record's entry, as `_starts` counts them; None if a place has no entry."""
    places = np.frombuffer(part.records, np.dtype([("key", f"V{key_bytes}"), ("place", "<u8")]))["place"]
    slots, ordinals = (places >> np.uint64(32)).astype(np.int64), (places & np.uint64(0xFFFF_FFFF)).astype(np.int64)
    if (slots >= len(counts)).any() or (ordinals >= counts[slots]).any():
        return None
    rows: Starts = starts[slots] + ordinals
    return rows


# Opening.


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """An index as the last end has saved it. Its file is open, and has no name any more."""

    fd: int
    files: SegmentFiles
    header: Header
    uses: Sequence[Use]
    parts: Sequence[tuple[int, bytes]]  # the size of each, and its checksum

    def index_of(self, found: Sequence[Segment], threads: int) -> tuple[KeyTable, dict[int, Hashes]] | None:
        """Return the index of segments, and the hashes of their keys by slot; None if this is not their index."""
        header = self.header
        if uses_of(found, header.epoch) != self.uses:
            return None
        starts, counts = _starts(self.uses)
        hashes = np.zeros(int(counts.sum()), np.uint32)
        is_taken = np.zeros(len(hashes), bool)
        offsets = list(accumulate((size for size, _ in self.parts), initial=header.header_bytes))

        def read(number: int) -> tuple[list[bytes], int] | None:
            part, own = self._read_part(number, offsets[number])
            if part is None:
                return None
            first = number * _PART_BUCKETS
            rows = _rows(part, header.key_bytes, starts, counts)
            numbers = np.arange(first, first + len(part.sizes), dtype=np.uint32)
            buckets = np.repeat(numbers, np.frombuffer(part.sizes, np.uint8))
            if rows is None or (bucket_indexes(own, header.bucket_count) != buckets).any():
                return None
            hashes[rows] = own
            is_taken[rows] = True
            return part.buckets(header.key_bytes + _NUMBER_BYTES), len(rows)

        calls = run_all(read, range(len(self.parts)), "tiered-kv-nvme-recovery", threads)
        buckets, count = list[bytes](), 0
        try:
            for call in calls:
                part = call.result()
                if part is None:
                    return None
                buckets += part[0]
                count += part[1]
        except OSError as error:
            self.files.counters.note_io_error("reading the saved index", error)
            return None
        if not count == header.key_count == np.count_nonzero(is_taken):
            return None
        table = KeyTable.of_buckets(header.key_bytes, buckets, count, _NUMBER_BYTES)
        by_slot = {use.slot: hashes[starts[use.slot] :][: use.entry_count].copy() for use in self.uses}
        return table, by_slot

    def _read_part(self, number: int, offset: int) -> tuple[TablePart | None, Hashes]:
        """Return a verified part, and the hashes of its keys in the order of its records."""
        size_bytes, digest = self.parts[number]
        count = min(_PART_BUCKETS, self.header.bucket_count - number * _PART_BUCKETS)
        content = ThreadBuffer().take(size_bytes)
        none = np.zeros(0, np.uint32)
        if read_all(self.fd, [content], offset, preadv=self.files.disk.preadv) != size_bytes:
            return None, none
        if checksum(content) != digest or size_bytes < count:
            return None, none
        sizes = np.frombuffer(content[:count], np.uint8)
        key_count = int(sizes.sum(dtype=np.int64))
        end = count + key_count * (self.header.key_bytes + _NUMBER_BYTES)
        if end + 4 * key_count != size_bytes:
            return None, none
        part = TablePart(bytes(content[:count]), bytes(content[count:end]))
        return part, np.frombuffer(content[end:], "<u4").astype(np.uint32)

    def close(self) -> None:
        os.close(self.fd)


def take_index(files: SegmentFiles, epoch: int) -> SavedIndex | None:
    """Open the saved index and delete its file; return None if there is none for this directory and epoch.

    What cannot be opened as ours is deleted too. A file that cannot be deleted is not used: it may be from before a
    crash.
    """
    directory = files.directory
    try:
        fd = os.open(INDEX_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory.fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        files.counters.note_io_error("opening the saved index", error)
        fd = -1
    saved = None
    try:
        if fd >= 0:
            saved = _opened(fd, files, epoch)
        os.unlink(INDEX_NAME, dir_fd=directory.fd)
    except OSError as error:
        files.counters.note_io_error("opening the saved index", error)
        saved = None
    finally:
        if saved is None and fd >= 0:
            os.close(fd)
    return saved


def _opened(fd: int, files: SegmentFiles, epoch: int) -> SavedIndex | None:
    """Return the saved index in an open file; None if its header is damaged, or of another directory or epoch."""
    directory = files.directory
    try:
        file_bytes = check_file(fd, INDEX_NAME, any_owner=not directory.claimed.private).st_size
    except NotPrivateError:
        return None
    page = ThreadBuffer().take(PAGE_BYTES)
    if read_all(fd, [page], preadv=files.disk.preadv) != PAGE_BYTES or page[:8] != _MAGIC:
        return None
    version, *fields = _HEADER.unpack_from(page, _PROLOGUE.size)
    header = Header(*fields)
    part_count = -(-header.bucket_count // _PART_BUCKETS)
    if (
        version != _FORMAT_VERSION
        or (header.digest, header.epoch) != (directory.identity.digest, epoch)
        or not 0 < header.key_bytes <= KEY_BYTES_MAX
        or not 0 < header.use_count <= SEGMENTS_MAX
        or not 0 < header.part_count == part_count <= file_bytes
        or header.header_bytes != _header_bytes(header.use_count, header.part_count)
        or header.header_bytes > file_bytes
    ):
        return None
    content = ThreadBuffer().take(header.header_bytes)
    if read_all(fd, [content], preadv=files.disk.preadv) != len(content):
        return None
    if _PROLOGUE.unpack_from(content)[1] != checksum(content[_PROLOGUE.size :]):
        return None
    at = _PROLOGUE.size + _HEADER.size
    middle, end = at + header.use_count * _USE.size, at + header.use_count * _USE.size + header.part_count * _PART.size
    uses = [Use(*each) for each in _USE.iter_unpack(content[at:middle])]
    parts: list[tuple[int, bytes]] = list(_PART.iter_unpack(content[middle:end]))
    is_whole = header.header_bytes + sum(size for size, _ in parts) == file_bytes
    return SavedIndex(fd, files, header, uses, parts) if is_whole else None
