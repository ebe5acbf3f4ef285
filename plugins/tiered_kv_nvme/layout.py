"""The layout of a segment, format version 1: encodes and decodes it, without I/O. See docs/reference/formats-nvme.md.

Writers, readers, the reclaimer, recovery and the administration call it, on any thread. Bytes from the disk are hostile
until their checksum is verified. Damage decodes to None, never to an exception. No length allocates memory before it is
checked.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.system.collector import untracked

FORMAT_VERSION = 1
PAGE_BYTES = 4096  # alignment of direct transfers
KEY_BYTES_MAX = 1024
CHECKSUM_BYTES = 16
_NUMBER_MAX = (1 << 63) - 1
"""The greatest accepted size, offset or number: a valid file offset whose successor can be encoded."""

_SEGMENT_MAGIC = b"TKVNSEG1"
_BATCH_MAGIC = b"TKVNBAT1"
_SUMMARY_MAGIC = b"TKVNSUM1"

_PROLOGUE = struct.Struct("<8s16s")  # magic, checksum of the bytes behind it
_SEGMENT = struct.Struct("<II16sQQQQ")
_BATCH = struct.Struct("<II16sQQQQQ")
_SUMMARY = struct.Struct("<II16sQQQQQ16s")
_ENTRY = struct.Struct("<QIHH16s")
_ENTRY_COLUMNS = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("key", "<u2"), ("codec", "<u2"), ("sum", "V16")])
_BATCH_TABLE_OFFSET = _PROLOGUE.size + _BATCH.size
ENTRY_BYTES = _ENTRY.size

checksum = xxhash.xxh3_128_digest


def pages(size_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def batch_header_bytes(count: int, key_bytes: int) -> int:
    """Return the size of a header for `count` blocks with `key_bytes` of keys in total."""
    return pages(_BATCH_TABLE_OFFSET + count * ENTRY_BYTES + key_bytes)


def summary_bytes(count: int, key_bytes: int) -> int:
    """Return the size of a segment's summary with its footer."""
    return pages(count * ENTRY_BYTES + key_bytes) + PAGE_BYTES


class SegmentHeader(NamedTuple):
    """The first page of a segment."""

    digest: bytes
    """The digest of the namespace."""
    generation: int
    """The number of the segment's present use."""
    segment_bytes: int
    block_bytes: int
    refused_offset: int = 0  # where the disk refused a batch: no batch lies there or behind; 0: it refused none

    def encode(self, page: memoryview) -> None:
        _fill(page, _SEGMENT_MAGIC, _SEGMENT.pack(FORMAT_VERSION, PAGE_BYTES, *self))

    @classmethod
    def decode(cls, page: memoryview) -> SegmentHeader | None:
        """Return the header in `page`; None if it is damaged or of another version."""
        if not _intact(page, _SEGMENT_MAGIC):
            return None
        version, page_bytes, *fields = _SEGMENT.unpack_from(page, _PROLOGUE.size)
        if version != FORMAT_VERSION or page_bytes != PAGE_BYTES:
            return None
        header = cls(*fields)
        fits = 2 * PAGE_BYTES <= header.segment_bytes <= _NUMBER_MAX and header.segment_bytes % PAGE_BYTES == 0
        return header if fits and header.generation < _NUMBER_MAX else None


class BatchHeader(NamedTuple):
    """The fields before a batch's entries."""

    header_bytes: int  # whole pages, with the entries and their keys
    entry_count: int
    digest: bytes
    """The digest of the namespace."""
    generation: int
    """The number of the segment's use in which the bytes were written."""
    epoch: int
    sequence: int  # the batch's number in this use of the segment
    offset: int
    """The place of the batch in the file, in bytes."""
    batch_bytes: int  # whole pages, with the payloads

    def encode(self, header: memoryview, entries: Sequence[SegmentEntry], keys: Sequence[OffloadKey]) -> None:
        """Write the header, its entries and their keys into `header`, of `header_bytes`."""
        pack = _ENTRY.pack
        table = [
            pack(e.offset, e.stored_bytes, len(k), e.codec, e.checksum) for e, k in zip(entries, keys, strict=True)
        ]
        _fill(header, _BATCH_MAGIC, b"".join((_BATCH.pack(*self), *table, *keys)))

    @classmethod
    def peek(cls, page: memoryview) -> BatchHeader | None:
        """Return the unverified fields in the header's first page; None if no batch begins here."""
        if page[:8] != _BATCH_MAGIC:
            return None
        return cls(*_BATCH.unpack_from(page, _PROLOGUE.size))

    def decode_entries(self, header: memoryview, stored_bytes_max: int) -> EntryTable | None:
        """Return the entries in `header`, of `header_bytes`; None if it is damaged."""
        if not _intact(header, _BATCH_MAGIC):
            return None
        end_offset = self.offset + self.batch_bytes
        return EntryTable.decode(header[_BATCH_TABLE_OFFSET:], self.entry_count, stored_bytes_max, end_offset)


class Summary(NamedTuple):
    """The footer of a segment's summary. Recovery reads the summary and not the batches before `end_offset`."""

    table_bytes: int  # whole pages, with the keys
    entry_count: int
    digest: bytes
    """The digest of the namespace."""
    generation: int
    """The number of the segment's use in which the bytes were written."""
    epoch: int
    sequence: int
    """The sequence number of the next batch."""
    end_offset: int
    """The end of the listed batches in the file, in bytes."""
    segment_bytes: int
    table_checksum: bytes

    def encode(self, page: memoryview) -> None:
        _fill(page, _SUMMARY_MAGIC, _SUMMARY.pack(*self))

    @classmethod
    def decode(cls, page: memoryview) -> Summary | None:
        """Return the footer in `page`; None if it is damaged or was never written."""
        if not _intact(page, _SUMMARY_MAGIC):
            return None
        summary = cls(*_SUMMARY.unpack_from(page, _PROLOGUE.size))
        fits = (
            PAGE_BYTES <= summary.end_offset <= summary.segment_bytes - PAGE_BYTES
            and summary.end_offset % PAGE_BYTES == summary.table_bytes % PAGE_BYTES == 0
        )
        return summary if fits and summary.sequence < _NUMBER_MAX else None


class SegmentEntry(NamedTuple):
    """One stored block. Size and checksum belong to the payload as stored."""

    offset: int
    """The place of the payload in the file, in bytes."""
    stored_bytes: int
    codec: int
    """The number of the codec; see `tiered_kv/toolkit/codecs.py`."""
    checksum: bytes


class EntryTable:
    """The entries of a segment in the order of their writing, as columns: 32 bytes and a reference per entry.

    The garbage collector does not walk the entries.

    Appending needs the pool's lock. Reading an entry does not: until the segment is reclaimed, columns only grow.
    """

    __slots__ = ("checksums", "codecs", "keys", "offsets", "states", "stored_bytes")

    def __init__(self) -> None:
        self.keys: list[OffloadKey] = untracked([])
        self.offsets = array("Q")
        self.stored_bytes = array("I")
        self.codecs = array("H")
        self.checksums = bytearray()
        self.states = array("H")  # how each block was used; see `Worth`

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, ordinal: int) -> SegmentEntry:
        start = ordinal * CHECKSUM_BYTES
        return SegmentEntry(
            self.offsets[ordinal],
            self.stored_bytes[ordinal],
            self.codecs[ordinal],
            bytes(self.checksums[start : start + CHECKSUM_BYTES]),
        )

    def append(self, keys: Sequence[OffloadKey], entries: Sequence[SegmentEntry], states: Sequence[int]) -> None:
        """Add the blocks of one batch: all of them, or none after an error (`MemoryError`)."""
        count = len(self.keys)
        try:
            self.offsets.extend([entry.offset for entry in entries])
            self.stored_bytes.extend([entry.stored_bytes for entry in entries])
            self.codecs.extend([entry.codec for entry in entries])
            self.checksums += b"".join([entry.checksum for entry in entries])
            self.states.extend(states)
            self.keys += keys
        except BaseException:  # columns of different lengths would misnumber later entries
            for column in (self.offsets, self.stored_bytes, self.codecs, self.states, self.keys):
                del column[count:]
            del self.checksums[count * CHECKSUM_BYTES :]
            raise

    def extend(self, other: EntryTable) -> None:
        for column in self.__slots__:
            getattr(self, column).extend(getattr(other, column))

    def encode(self) -> bytes:
        """Return the summary's table: entries, then keys."""
        columns = np.zeros(len(self), dtype=_ENTRY_COLUMNS)
        columns["offset"] = np.frombuffer(self.offsets, dtype=np.uint64)
        columns["stored"] = np.frombuffer(self.stored_bytes, dtype=np.uint32)
        columns["key"] = np.fromiter(map(len, self.keys), dtype=np.uint16, count=len(self))
        columns["codec"] = np.frombuffer(self.codecs, dtype=np.uint16)
        columns["sum"] = np.frombuffer(self.checksums, dtype="V16")
        return columns.tobytes() + b"".join(self.keys)

    @classmethod
    def decode(cls, table: memoryview, count: int, stored_bytes_max: int, end_offset_max: int) -> EntryTable | None:
        """Return the table of `count` entries at the start of `table`.

        None if sizes are invalid, or if a payload exceeds `stored_bytes_max` or ends after `end_offset_max`.
        """
        keys_offset = count * ENTRY_BYTES
        if keys_offset > len(table):
            return None
        columns = np.frombuffer(table[:keys_offset], dtype=_ENTRY_COLUMNS)
        lengths = columns["key"]
        offsets = columns["offset"]
        ends = offsets + columns["stored"]
        if (
            int(lengths.sum(dtype=np.int64)) > len(table) - keys_offset
            or (columns["stored"] > stored_bytes_max).any()
            or ((lengths == 0) | (lengths > KEY_BYTES_MAX)).any()
            or (offsets > end_offset_max).any()  # `ends` may have overflowed
            or (ends > end_offset_max).any()
        ):
            return None
        decoded = cls()
        keys, key_bytes = bytes(table[keys_offset:]), lengths.tolist()
        ends_and_sizes = zip(accumulate(key_bytes), key_bytes, strict=True)
        decoded.keys.extend([OffloadKey(keys[end - size : end]) for end, size in ends_and_sizes])
        decoded.offsets.frombytes(columns["offset"].astype(np.uint64).tobytes())
        decoded.stored_bytes.frombytes(columns["stored"].astype(np.uint32).tobytes())
        decoded.codecs.frombytes(columns["codec"].astype(np.uint16).tobytes())
        decoded.checksums += columns["sum"].tobytes()
        decoded.states.frombytes(bytes(count * decoded.states.itemsize))
        return decoded


def _fill(target: memoryview, magic: bytes, body: bytes) -> None:
    """Write magic, checksum, `body` and zeros into `target`."""
    end = _PROLOGUE.size + len(body)
    target[_PROLOGUE.size : end] = body
    target[end:] = bytes(len(target) - end)
    _PROLOGUE.pack_into(target, 0, magic, checksum(target[_PROLOGUE.size :]))


def _intact(record: memoryview, magic: bytes) -> bool:
    found, stored = _PROLOGUE.unpack_from(record)
    return bool(found == magic and stored == checksum(record[_PROLOGUE.size :]))
