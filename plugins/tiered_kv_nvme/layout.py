"""The bytes of a segment, format version 1; docs/reference/formats-nvme.md draws them.

A segment is a header page, batches front to back, and at its very end a summary of its batches. Everything
but payloads begins with a magic and an xxh3-128 checksum over all that follows in it. Integers are
little-endian. Nothing here does I/O.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey

FORMAT_VERSION = 1
PAGE_BYTES = 4096
"""Alignment of everything that a direct transfer begins or ends at."""
KEY_BYTES_MAX = 1024
CHECKSUM_BYTES = 16
_NUMBER_MAX = (1 << 63) - 1
"""The greatest size, offset or number that is accepted: it is a valid offset, and one more can be written."""

_SEGMENT_MAGIC = b"TKVNSEG1"
_BATCH_MAGIC = b"TKVNBAT1"
_SUMMARY_MAGIC = b"TKVNSUM1"

_PROLOGUE = struct.Struct("<8s16s")  # magic, checksum of what follows
_SEGMENT = struct.Struct("<II16sQQQ")
_BATCH = struct.Struct("<II16sQQQQQ")
_SUMMARY = struct.Struct("<II16sQQQQQ16s")
_ENTRY = struct.Struct("<QIHH16s")
_ENTRY_COLUMNS = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("key", "<u2"), ("codec", "<u2"), ("sum", "V16")])
_BATCH_TABLE_OFFSET = _PROLOGUE.size + _BATCH.size
ENTRY_BYTES = _ENTRY.size

checksum = xxhash.xxh3_128_digest
"""The checksum of a buffer, 16 bytes."""


def pages(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def batch_header_bytes(count: int, key_bytes: int) -> int:
    """Return the size of the header of a batch of `count` blocks whose keys are `key_bytes` in all."""
    return pages(_BATCH_TABLE_OFFSET + count * ENTRY_BYTES + key_bytes)


def summary_bytes(count: int, key_bytes: int) -> int:
    """Return the size of a segment's summary, its footer page included."""
    return pages(count * ENTRY_BYTES + key_bytes) + PAGE_BYTES


class SegmentHeader(NamedTuple):
    """The first page of a segment; the fields are those of docs/reference/formats-nvme.md."""

    digest: bytes
    generation: int
    segment_bytes: int
    block_bytes: int

    def encode(self, page: memoryview) -> None:
        """Write the header into `page`, which is `PAGE_BYTES` long."""
        _fill(page, _SEGMENT_MAGIC, _SEGMENT.pack(FORMAT_VERSION, PAGE_BYTES, *self))

    @classmethod
    def decode(cls, page: memoryview) -> SegmentHeader | None:
        """Return the header in `page`, or None if it is damaged or of another version."""
        if not _intact(page, _SEGMENT_MAGIC):
            return None
        version, page_bytes, *fields = _SEGMENT.unpack_from(page, _PROLOGUE.size)
        if version != FORMAT_VERSION or page_bytes != PAGE_BYTES:
            return None
        header = cls(*fields)
        fits = 2 * PAGE_BYTES <= header.segment_bytes <= _NUMBER_MAX and header.segment_bytes % PAGE_BYTES == 0
        return header if fits and header.generation < _NUMBER_MAX else None


class BatchHeader(NamedTuple):
    """What stands before a batch's entries; the fields are those of docs/reference/formats-nvme.md."""

    header_bytes: int
    entry_count: int
    digest: bytes
    generation: int
    epoch: int
    sequence: int
    offset: int
    batch_bytes: int

    def encode(self, header: memoryview, entries: Sequence[Entry], keys: Sequence[OffloadKey]) -> None:
        """Write the header, its entries and their keys into `header`, which is `header_bytes` long."""
        pack = _ENTRY.pack
        table = [
            pack(e.offset, e.stored_bytes, len(k), e.codec, e.checksum) for e, k in zip(entries, keys, strict=True)
        ]
        _fill(header, _BATCH_MAGIC, b"".join((_BATCH.pack(*self), *table, *keys)))

    @classmethod
    def peek(cls, page: memoryview) -> BatchHeader | None:
        """Return the fields in the header's first page, not verified, or None if no batch begins here."""
        if page[:8] != _BATCH_MAGIC:
            return None
        return cls(*_BATCH.unpack_from(page, _PROLOGUE.size))

    def decode_entries(self, header: memoryview, stored_bytes_max: int) -> EntryTable | None:
        """Return the entries in `header`, all `header_bytes` of it, or None if it is damaged."""
        if not _intact(header, _BATCH_MAGIC):
            return None
        end_offset = self.offset + self.batch_bytes
        return EntryTable.decode(header[_BATCH_TABLE_OFFSET:], self.entry_count, stored_bytes_max, end_offset)


class Summary(NamedTuple):
    """The footer of a segment's summary; the fields are those of docs/reference/formats-nvme.md.

    It replaces the headers of the batches before `end_offset`, so that recovery need not read these. Later
    batches follow there.
    """

    table_bytes: int
    entry_count: int
    digest: bytes
    generation: int
    epoch: int
    sequence: int
    end_offset: int
    segment_bytes: int
    table_checksum: bytes

    def encode(self, page: memoryview) -> None:
        """Write the footer into `page`, which is `PAGE_BYTES` long."""
        _fill(page, _SUMMARY_MAGIC, _SUMMARY.pack(*self))

    @classmethod
    def decode(cls, page: memoryview) -> Summary | None:
        """Return the footer in `page`, or None if it is damaged or was never written."""
        if not _intact(page, _SUMMARY_MAGIC):
            return None
        summary = cls(*_SUMMARY.unpack_from(page, _PROLOGUE.size))
        fits = (
            PAGE_BYTES <= summary.end_offset <= summary.segment_bytes - PAGE_BYTES
            and summary.end_offset % PAGE_BYTES == summary.table_bytes % PAGE_BYTES == 0
        )
        return summary if fits and summary.sequence < _NUMBER_MAX else None


class Entry(NamedTuple):
    """One stored block: where its payload begins, its size as stored, its codec's number, its checksum as stored."""

    offset: int
    stored_bytes: int
    codec: int
    checksum: bytes


class EntryTable:
    """The entries of a segment, in the order they were written, as columns: 32 bytes and a reference each.

    Columns are only ever appended to. Appending needs the pool's lock; reading an entry does not.
    """

    __slots__ = ("checksums", "codecs", "keys", "offsets", "stored_bytes", "used")

    def __init__(self) -> None:
        self.keys: list[OffloadKey] = []
        self.offsets = array("Q")
        self.stored_bytes = array("I")
        self.codecs = array("H")
        self.checksums = bytearray()
        self.used = array("H")
        """How a block was used, as `Worth` notes it: its state."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, ordinal: int) -> Entry:
        start = ordinal * CHECKSUM_BYTES
        return Entry(
            self.offsets[ordinal],
            self.stored_bytes[ordinal],
            self.codecs[ordinal],
            bytes(self.checksums[start : start + CHECKSUM_BYTES]),
        )

    def append(self, keys: Sequence[OffloadKey], entries: Sequence[Entry], states: Sequence[int]) -> None:
        """Add the blocks of one batch: all of them, or none if there is no memory for them."""
        count = len(self.keys)
        try:
            self.offsets.extend([entry.offset for entry in entries])
            self.stored_bytes.extend([entry.stored_bytes for entry in entries])
            self.codecs.extend([entry.codec for entry in entries])
            self.checksums += b"".join([entry.checksum for entry in entries])
            self.used.extend(states)
            self.keys += keys
        except BaseException:  # columns of different lengths would give later entries the wrong numbers
            for column in (self.offsets, self.stored_bytes, self.codecs, self.used, self.keys):
                del column[count:]
            del self.checksums[count * CHECKSUM_BYTES :]
            raise

    def extend(self, other: EntryTable) -> None:
        """Add another table's entries after the own ones."""
        self.keys += other.keys
        self.offsets.extend(other.offsets)
        self.stored_bytes.extend(other.stored_bytes)
        self.codecs.extend(other.codecs)
        self.checksums += other.checksums
        self.used.extend(other.used)

    def encode(self) -> bytes:
        """Return the table's form in a summary: the entries, then their keys."""
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

        None if it cannot be one: no payload exceeds `stored_bytes_max`, or ends behind `end_offset_max`.
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
            or (offsets > end_offset_max).any()  # for itself too: the sum may have overflowed
            or (ends > end_offset_max).any()
        ):
            return None
        decoded = cls()
        decoded.keys = _split(bytes(table[keys_offset:]), lengths.tolist())
        decoded.offsets.frombytes(columns["offset"].astype(np.uint64).tobytes())
        decoded.stored_bytes.frombytes(columns["stored"].astype(np.uint32).tobytes())
        decoded.codecs.frombytes(columns["codec"].astype(np.uint16).tobytes())
        decoded.checksums += columns["sum"].tobytes()
        decoded.used.frombytes(bytes(count * decoded.used.itemsize))
        return decoded


def _split(blob: bytes, lengths: list[int]) -> list[OffloadKey]:
    if not lengths:
        return []
    size = lengths[0]
    if lengths.count(size) == len(lengths):  # the usual case, and five times as fast
        return [OffloadKey(blob[at : at + size]) for at in range(0, size * len(lengths), size)]
    keys: list[OffloadKey] = []
    at = 0
    for length in lengths:
        keys.append(OffloadKey(blob[at : at + length]))
        at += length
    return keys


def _fill(target: memoryview, magic: bytes, body: bytes) -> None:
    """Make `target` the record of `magic` and `body`: zeros after it, its checksum before it."""
    end = _PROLOGUE.size + len(body)
    target[_PROLOGUE.size : end] = body
    target[end:] = bytes(len(target) - end)
    _PROLOGUE.pack_into(target, 0, magic, checksum(target[_PROLOGUE.size :]))


def _intact(record: memoryview, magic: bytes) -> bool:
    """Return whether `record` is one of `magic` whose checksum is right."""
    found, stored = _PROLOGUE.unpack_from(record)
    return bool(found == magic and stored == checksum(record[_PROLOGUE.size :]))
