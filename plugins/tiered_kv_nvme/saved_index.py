"""The saved index: a file that a clean end leaves, so that the next opening need not build the index from all keys.

`SegmentStore.close` saves it, when no other thread uses the directory. The next opening takes it before it reads the
segments, and uses it after; several threads read it. docs/reference/formats-nvme.md describes the file.

What must stay true:

- An opening deletes the file before the tier serves. So no process ever meets one from before a crash.
- It is used whole or not at all: if each segment has the use and the summary that the file names, each part has its
  checksum, and each record names an entry. So it is the index of exactly these segments, as it was in memory.
- It is within the capacity, and saved in a bounded time. Without it, an opening builds the index from the segments.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiered_kv.cpu.key_hashes import key_hashes
from tiered_kv.cpu.key_shards import SHARDS, Shard, shard_of
from tiered_kv.cpu.key_table import KeyTable
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
_FORMAT_VERSION = 2
_PART_SHARDS = 16
_PARTS = SHARDS // _PART_SHARDS
_NUMBER_BYTES = 8

_MAGIC = b"TKVNIDX1"
_PROLOGUE = struct.Struct("<8s16s")  # magic, checksum of the header's bytes behind it
_HEADER = struct.Struct("<II16sQQIIII")
_USE = struct.Struct("<IIQ16s")
_SIZES = struct.Struct(f"<{SHARDS}I")
_CHECKSUMS = struct.Struct("16s" * (_PARTS + 1))

Counts = NDArray[np.uint64]


class Use(NamedTuple):
    """A segment's use, as its header and its summary have it."""

    slot: int
    entry_count: int
    generation: int
    table_checksum: bytes  # of its summary


class Header(NamedTuple):
    """The fields before the uses of segments, the sizes of shards and the checksums of parts."""

    header_bytes: int  # whole pages
    digest: bytes
    """The digest of the namespace."""
    epoch: int
    key_count: int
    shard_count: int
    key_bytes: int  # of one key
    use_count: int
    crowded_count: int  # keys that are in no shard


def uses_of(segments: Sequence[Segment], epoch: int) -> list[Use] | None:
    """Return the uses of the segments that hold blocks; None if one has no summary of all its blocks."""
    holding = [segment for segment in segments if len(segment.table) and segment.epoch == epoch]
    if any(segment.damaged or segment.state is not SegmentState.SEALED for segment in holding):
        return None
    uses = (Use(each.slot, len(each.table), each.generation, each.table_checksum) for each in holding)
    return sorted(uses)


def _counts(uses: Sequence[Use]) -> Counts:
    """Return the number of entries of each segment, by slot."""
    counts = np.zeros(max((use.slot for use in uses), default=0) + 1, np.uint64)
    for use in uses:
        counts[use.slot] = use.entry_count
    return counts


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
    uses, crowded = uses_of(segments, epoch), places.crowded
    if began_s >= end_s or not uses or crowded is None or len(uses) > SEGMENTS_MAX:
        return False
    hashes = _hashes_of(segments, uses, places.key_bytes)
    if hashes is None:
        return False
    # Where the file system has no fallocate(2), the next opening would fill new segments with zeros.
    free = [each for each in segments if each.state is SegmentState.FREE and not files.disk.writes_zeros]
    header = Header(
        _header_bytes(len(uses)),
        files.directory.identity.digest,
        epoch,
        len(places),
        SHARDS,
        places.key_bytes,
        len(uses),
        len(crowded),
    )
    end_content = [hashes.astype("<u4", copy=False).tobytes(), *(key + struct.pack("<Q", at) for key, at in crowded)]
    contents = sum(len(tags) + len(records) for tags, records, _ in places.shards)
    size_bytes = pages(header.header_bytes + contents + sum(map(len, end_content)))
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
        is_saved = _write(fd, files, header, uses, places, b"".join(end_content), began_s, end_s)
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
    end_content: bytes,
    began_s: float,
    end_s: float,
) -> bool:
    """Write all parts, and the header last; return False as soon as the time would not suffice."""
    offset, checksums = header.header_bytes, list[bytes]()
    contents: list[list[bytearray | bytes]] = [
        [*chain.from_iterable(shard[:2] for shard in places.shards[first : first + _PART_SHARDS])]
        for first in range(0, SHARDS, _PART_SHARDS)
    ]
    contents.append([end_content])
    for number, content in enumerate(contents):
        write_all(fd, [memoryview(each) for each in content if each], offset, pwritev=files.disk.pwritev)
        offset += sum(map(len, content))
        checksums.append(_checksum(content))
        passed_s = time.monotonic() - began_s
        share = (number + 1) / len(contents) if number >= _PARTS // 4 else 1.0  # the first parts say little
        if passed_s > (end_s - began_s) * share:
            return False
    sizes = _SIZES.pack(*(len(tags) for tags, _, _ in places.shards))
    used = b"".join(_USE.pack(*use) for use in uses)
    body = b"".join((_HEADER.pack(_FORMAT_VERSION, *header), used, sizes, _CHECKSUMS.pack(*checksums)))
    body = body.ljust(header.header_bytes - _PROLOGUE.size, b"\0")
    write_all(fd, [memoryview(_PROLOGUE.pack(_MAGIC, checksum(body))), memoryview(body)], 0, pwritev=files.disk.pwritev)
    return True


def _checksum(content: Sequence[bytearray | bytes]) -> bytes:
    digest = xxhash.xxh3_128()
    for each in content:
        digest.update(each)
    return digest.digest()


def _header_bytes(use_count: int) -> int:
    return pages(_PROLOGUE.size + _HEADER.size + use_count * _USE.size + _SIZES.size + _CHECKSUMS.size)


# Opening.


def _are_entries(places: NDArray[np.uint64], counts: Counts) -> bool:
    """Return whether each place has an entry in its segment; `counts` by slot."""
    slots = places >> np.uint64(32)
    if not len(slots) or slots.max() >= len(counts):
        return not len(slots)
    return bool((places & np.uint64(0xFFFF_FFFF) < counts.take(slots.astype(np.intp))).all())


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """An index as the last end has saved it. Its file is open, and has no name any more."""

    fd: int
    files: SegmentFiles
    header: Header
    uses: Sequence[Use]
    sizes: Sequence[int]  # how many slots each shard has
    checksums: Sequence[bytes]  # of the parts, and of the hashes

    def index_of(self, found: Sequence[Segment], threads: int) -> tuple[KeyTable, dict[int, Hashes]] | None:
        """Return the index of segments, and the hashes of their keys by slot; None if this is not their index."""
        if uses_of(found, self.header.epoch) != self.uses:
            return None
        try:
            return self._read(threads)
        except OSError as error:
            self.files.counters.note_io_error("reading the saved index", error)
            return None

    def _read(self, threads: int) -> tuple[KeyTable, dict[int, Hashes]] | None:
        header = self.header
        slot_bytes = 1 + header.key_bytes + _NUMBER_BYTES
        offsets = list(accumulate((size * slot_bytes for size in self.sizes), initial=header.header_bytes))
        counts = _counts(self.uses)
        record = np.dtype([("key", f"V{header.key_bytes}"), ("place", "<u8")])
        content = bytearray(4 * sum(use.entry_count for use in self.uses))
        crowded = bytearray(header.crowded_count * record.itemsize)
        if not self._fill([content, crowded], offsets[-1], self.checksums[-1]):
            return None
        hashes = np.frombuffer(content, "<u4").astype(np.uint32, copy=False)

        def read(number: int) -> tuple[list[Shard], int] | None:
            first = number * _PART_SHARDS
            sizes = self.sizes[first : first + _PART_SHARDS]
            shards = [shard_of(size, record.itemsize) for size in sizes]
            buffers = [*chain.from_iterable(each[:2] for each in shards)]
            if not self._fill(buffers, offsets[first], self.checksums[number]):
                return None
            used = np.flatnonzero(np.concatenate([np.frombuffer(tags, np.uint8) for tags, _, _ in shards]))
            places = np.concatenate([np.frombuffer(records, record)["place"] for _, records, _ in shards])[used]
            return (shards, len(places)) if _are_entries(places, counts) else None

        parts = [each.result() for each in run_all(read, range(_PARTS), "tiered-kv-nvme-recovery", threads)]
        read_parts = [part for part in parts if part is not None]
        others = np.frombuffer(crowded, record)
        count = sum(part[1] for part in read_parts) + len(others)
        if len(read_parts) < _PARTS or count != header.key_count or not _are_entries(others["place"], counts):
            return None
        shards = [*chain.from_iterable(part[0] for part in read_parts)]
        table = KeyTable.of_shards(header.key_bytes, shards, _NUMBER_BYTES)
        table.set_many([each.tobytes() for each in others["key"]], others["place"].tolist())
        ends = accumulate(use.entry_count for use in self.uses)
        return table, {
            use.slot: hashes[end - use.entry_count : end].copy() for use, end in zip(self.uses, ends, strict=True)
        }

    def _fill(self, content: Sequence[bytearray], offset: int, digest: bytes) -> bool:
        """Read bytes of the file into `content`; return whether they have this checksum."""
        buffers = [memoryview(each) for each in content if each]
        size_bytes = sum(map(len, buffers))
        if buffers and read_all(self.fd, buffers, offset, preadv=self.files.disk.preadv) != size_bytes:
            return False
        return _checksum(content) == digest

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
    if (
        version != _FORMAT_VERSION
        or (header.digest, header.epoch) != (directory.identity.digest, epoch)
        or not 0 < header.key_bytes <= KEY_BYTES_MAX
        or not 0 < header.use_count <= SEGMENTS_MAX
        or header.shard_count != SHARDS
        or header.header_bytes != _header_bytes(header.use_count)
        or header.header_bytes > file_bytes
    ):
        return None
    content = ThreadBuffer().take(header.header_bytes)
    if read_all(fd, [content], preadv=files.disk.preadv) != len(content):
        return None
    if _PROLOGUE.unpack_from(content)[1] != checksum(content[_PROLOGUE.size :]):
        return None
    at = _PROLOGUE.size + _HEADER.size
    end = at + header.use_count * _USE.size
    uses = [Use(*each) for each in _USE.iter_unpack(content[at:end])]
    sizes = _SIZES.unpack_from(content, end)
    checksums = _CHECKSUMS.unpack_from(content, end + _SIZES.size)
    record_bytes = header.key_bytes + _NUMBER_BYTES
    contents = sum(sizes) * (1 + record_bytes) + header.crowded_count * record_bytes
    is_whole = header.header_bytes + contents + 4 * sum(use.entry_count for use in uses) == file_bytes
    return SavedIndex(fd, files, header, uses, sizes, checksums) if is_whole else None
