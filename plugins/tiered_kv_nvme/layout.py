"""The layout of a segment, format version 1: encodes and decodes it, without I/O. See docs/reference/formats-nvme.md.

Writers, readers, the reclaimer, recovery and the administration call it, on any thread. Bytes from the disk are hostile
until their checksum is verified. Damage decodes to None, never to an exception. No length allocates memory before it is
checked.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.hints import TENANT_PATTERN

FORMAT_VERSION = 1
PAGE_BYTES = 4096  # alignment of direct transfers
KEY_BYTES_MAX = 1024
CHECKSUM_BYTES = 16
TENANT_NUMBER_BYTES = 2
_NUMBER_MAX = (1 << 63) - 1
"""The greatest accepted size, offset or number: a valid file offset whose successor can be encoded."""

_SEGMENT_MAGIC = b"TKVNSEG1"
_BATCH_MAGIC = b"TKVNBAT1"
_SUMMARY_MAGIC = b"TKVNSUM1"

_PROLOGUE = struct.Struct("<8s16s")  # magic, checksum of the bytes behind it
_SEGMENT = struct.Struct("<II16sQQQQ")
_BATCH = struct.Struct("<II16sQQQQQ")
_SUMMARY = struct.Struct("<II16sQQQQQ16s")
_NAMES = struct.Struct("<I")  # behind `_SUMMARY`: the size of the tenants' names, which follow
_ENTRY = struct.Struct("<QIHH16s")
_SPAN = struct.Struct("<QI")  # the beginning of an entry
_ENTRY_COLUMNS = np.dtype([("offset", "<u8"), ("stored", "<u4"), ("key", "<u2"), ("codec", "<u2"), ("sum", "V16")])
_BATCH_TABLE_OFFSET = _PROLOGUE.size + _BATCH.size
ENTRY_BYTES = _ENTRY.size
_NAMES_OFFSET = _PROLOGUE.size + _SUMMARY.size + _NAMES.size
TENANT_NAMES_BYTES_MAX = PAGE_BYTES - _NAMES_OFFSET
_MIXED = -1  # keys of different lengths

Hashes = np.ndarray[Any, np.dtype[np.uint32]]
Rows = np.ndarray[Any, np.dtype[np.uint8]]

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

    def encode(self, header: memoryview, entries: bytes, keys: Sequence[OffloadKey]) -> None:
        """Write the header, its entries (`encode_entries`) and their keys into `header`, of `header_bytes`."""
        _fill(header, _BATCH_MAGIC, b"".join((_BATCH.pack(*self), entries, *keys)))

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

    def encode(self, page: memoryview, tenant_names: bytes = b"") -> None:
        """Write the footer into `page`. `encode_names` gives the names, if the table has a number for each entry."""
        _fill(page, _SUMMARY_MAGIC, _SUMMARY.pack(*self) + _NAMES.pack(len(tenant_names)) + tenant_names)

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


def encode_names(names: Iterable[str]) -> bytes:
    """Return names of tenants as a footer has them: each behind its length."""
    return b"".join(bytes([len(name)]) + name.encode("ascii") for name in names)


def decode_names(page: memoryview) -> list[str]:
    """Return the names of tenants in an intact footer; a name that no tenant can have is empty."""
    (size_bytes,) = _NAMES.unpack_from(page, _NAMES_OFFSET - _NAMES.size)
    data = bytes(page[_NAMES_OFFSET : _NAMES_OFFSET + min(size_bytes, TENANT_NAMES_BYTES_MAX)])
    names: list[str] = []
    at = 0
    while at < len(data):
        name = data[at + 1 : at + 1 + data[at]].decode("ascii", "replace")
        names.append(name if re.fullmatch(TENANT_PATTERN, name) else "")
        at += 1 + data[at]
    return names


class SegmentEntry(NamedTuple):
    """One stored block. Size and checksum belong to the payload as stored."""

    offset: int
    """The place of the payload in the file, in bytes."""
    stored_bytes: int
    codec: int
    """The number of the codec; see `tiered_kv/toolkit/codecs.py`."""
    checksum: bytes


def encode_entries(
    keys: Iterable[OffloadKey],
    offsets: Iterable[int],
    stored_bytes: Iterable[int],
    codecs: Iterable[int],
    checksums: Iterable[bytes],
) -> bytes:
    """Return the entries of some blocks, as a batch's header and a summary have them."""
    return b"".join(map(_ENTRY.pack, offsets, stored_bytes, map(len, keys), codecs, checksums))


class EntryTable:
    """The entries of a segment in the order of their writing, encoded as on the disk: 34 bytes each, and their keys.

    A sealed segment needs no keys here: the index has them, and finds them by hash and place. So `forget_keys` leaves
    4 bytes for each key. There is no object for each entry.

    Appending and `forget_keys` need the pool's lock. Reading an entry does not: until the segment is reclaimed, the
    columns only grow. Whoever reads keys knows that no other thread forgets them.
    """

    __slots__ = ("_entries", "_keys", "_length", "hashes", "states", "tenants")

    def __init__(self) -> None:
        self._entries = bytearray()
        self._keys = bytearray()  # one after another
        self._length = 0  # the length of each key; `_MIXED` if they differ; 0 without entries
        self.hashes: Hashes | None = None  # of forgotten keys; None: the keys are here
        self.states = array("H")  # how each block was used; see `Worth`
        self.tenants = array("H")  # with `limits`, the number of each block's tenant; otherwise empty

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, ordinal: int) -> SegmentEntry:
        offset, stored_bytes, _, codec, digest = _ENTRY.unpack_from(self._entries, ordinal * ENTRY_BYTES)
        return SegmentEntry(offset, stored_bytes, codec, digest)

    def span(self, ordinal: int) -> tuple[int, int]:
        """Return where in the file a payload begins, and its size."""
        offset, stored_bytes = _SPAN.unpack_from(self._entries, ordinal * ENTRY_BYTES)
        return offset, stored_bytes

    def stored_bytes(self, ordinals: Sequence[int] | slice) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return the sizes of some payloads. Nothing may be appended while the caller has those of a slice."""
        sizes: np.ndarray[Any, np.dtype[np.uint32]] = np.frombuffer(self._entries, _ENTRY_COLUMNS)["stored"][ordinals]
        return sizes

    def keys(self, ordinals: range | Sequence[int] | None = None) -> list[OffloadKey]:
        """Return the keys of some entries, by default of all. The keys have not been forgotten."""
        assert self.hashes is None
        ordinals = range(len(self)) if ordinals is None else ordinals
        keys, size = self._keys, self._length
        if size != _MIXED:
            return [OffloadKey(bytes(keys[at * size : (at + 1) * size])) for at in ordinals]
        sizes = np.frombuffer(self._entries, _ENTRY_COLUMNS)["key"].astype(np.int64)
        ends = np.cumsum(sizes)
        return [OffloadKey(bytes(keys[ends[at] - sizes[at] : ends[at]])) for at in ordinals]

    @property
    def key_bytes(self) -> int:
        """The size of all keys that are here."""
        return len(self._keys)

    @property
    def key_rows(self) -> Rows | None:
        """A row for each key; None if there is none, or if their lengths differ. Nothing may be appended meanwhile."""
        if self._length == _MIXED or not len(self):
            return None
        return np.frombuffer(self._keys, np.uint8).reshape(len(self), -1)

    def append(
        self, keys: Sequence[OffloadKey], entries: bytes, states: Sequence[int], tenants: Sequence[int] = ()
    ) -> None:
        """Add the blocks of one batch: all of them, or none after an error (`MemoryError`).

        `encode_entries` gives `entries`. `tenants` has a number for each if `limits` are given.
        """
        count, key_end = len(self), len(self._keys)
        try:
            self._keys += b"".join(keys)
            self._entries += entries
            self.tenants.extend(tenants)
            self.states.extend(states)
        except BaseException:  # columns of different lengths would misnumber later entries
            del self.states[count:], self._entries[count * ENTRY_BYTES :], self._keys[key_end:], self.tenants[count:]
            raise
        self._note_lengths(set(map(len, keys)))

    def extend(self, other: EntryTable) -> None:
        """Add the entries of another table, which has its keys."""
        self._keys += other._keys
        self._entries += other._entries
        self.states.extend(other.states)
        self._note_lengths({other._length})

    def without(self, ordinals: Set[int]) -> EntryTable:
        """Return a table without some of the entries."""
        kept = [ordinal for ordinal in range(len(self)) if ordinal not in ordinals]
        left = EntryTable()
        entries = [self._entries[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES] for at in kept]
        tenants = [self.tenants[at] for at in kept if at < len(self.tenants)]
        left.append(self.keys(kept), b"".join(entries), [self.states[at] for at in kept], tenants)
        return left

    def forget_keys(self, hashes: Hashes) -> None:
        """Keep only the keys' hashes, with which the index finds them."""
        assert len(hashes) == len(self)
        self.hashes, self._keys = hashes, bytearray()

    def table_bytes(self, more_bytes: int = 0) -> int:
        """Return the size of the summary's table with `more_bytes` of tenants' numbers, in whole pages."""
        return pages(len(self._entries) + len(self._keys) + more_bytes)

    def encode(self, table: memoryview, tenants: bytes = b"") -> None:
        """Write the summary's table, of `table_bytes`: entries, then keys, then tenants' numbers, then zeros."""
        assert self.hashes is None
        content = b"".join((self._entries, self._keys, tenants))
        table[: len(content)], table[len(content) :] = content, bytes(len(table) - len(content))

    @classmethod
    def decode(
        cls,
        table: memoryview,
        count: int,
        stored_bytes_max: int,
        end_offset_max: int,
        *,
        has_tenants: bool = False,
    ) -> EntryTable | None:
        """Return the table of `count` entries at the start of `table`.

        None if sizes are invalid, or if a payload exceeds `stored_bytes_max` or ends after `end_offset_max`. If the
        table has tenants' numbers, they are taken as they are.
        """
        keys_offset = count * ENTRY_BYTES
        if keys_offset > len(table):
            return None
        decoded = cls()
        if not count:
            return decoded
        decoded._entries = bytearray(table[:keys_offset])
        columns = np.frombuffer(decoded._entries, dtype=_ENTRY_COLUMNS)
        lengths, offsets = columns["key"], columns["offset"]
        key_bytes_min, key_bytes_max = int(lengths.min()), int(lengths.max())
        is_alike = key_bytes_min == key_bytes_max
        keys_bytes = count * key_bytes_max if is_alike else int(lengths.sum(dtype=np.int64))
        if (
            not 0 < key_bytes_min <= key_bytes_max <= KEY_BYTES_MAX
            or keys_bytes > len(table) - keys_offset
            or columns["stored"].max() > stored_bytes_max
            or offsets.max() > end_offset_max  # the sums below may overflow
            or (offsets + columns["stored"]).max() > end_offset_max
        ):
            return None
        keys_end = keys_offset + keys_bytes
        decoded._keys = bytearray(table[keys_offset:keys_end])
        numbers = table[keys_end : keys_end + count * TENANT_NUMBER_BYTES]
        if has_tenants and len(numbers) == count * TENANT_NUMBER_BYTES:
            decoded.tenants.frombytes(np.frombuffer(numbers, "<u2").astype(np.uint16).tobytes())
        decoded.states.frombytes(bytes(count * decoded.states.itemsize))
        decoded._note_lengths({key_bytes_min, key_bytes_max})
        return decoded

    def _note_lengths(self, sizes: Set[int]) -> None:
        lengths = {self._length, *sizes} - {0}
        self._length = lengths.pop() if len(lengths) == 1 else _MIXED if lengths else 0


def local_tenants(table: EntryTable, names: Sequence[str]) -> tuple[bytes, bytes]:
    """Return the tenants' numbers of all entries, and their names, as a summary has them; empty without any.

    Those with most blocks are numbered from 1 on, as far as the footer has room for their names; other blocks have 0.
    """
    if not names or not len(table.tenants):
        return b"", b""
    numbers = np.zeros(len(table), np.intp)
    numbers[: len(table.tenants)] = table.tenants
    numbers[numbers >= len(names)] = 0
    counts = np.bincount(numbers, minlength=len(names))
    local, chosen, size_bytes = np.zeros(len(names), "<u2"), list[str](), 0
    for number in np.argsort(-counts, kind="stable").tolist():
        size_bytes += bool(counts[number] and names[number]) * (1 + len(names[number]))
        if counts[number] and names[number] and size_bytes <= TENANT_NAMES_BYTES_MAX:
            chosen.append(names[number])
            local[number] = len(chosen)
    return (local[numbers].tobytes(), encode_names(chosen)) if chosen else (b"", b"")


def _fill(target: memoryview, magic: bytes, body: bytes) -> None:
    """Write magic, checksum, `body` and zeros into `target`."""
    end = _PROLOGUE.size + len(body)
    target[_PROLOGUE.size : end] = body
    target[end:] = bytes(len(target) - end)
    _PROLOGUE.pack_into(target, 0, magic, checksum(target[_PROLOGUE.size :]))


def _intact(record: memoryview, magic: bytes) -> bool:
    found, stored = _PROLOGUE.unpack_from(record)
    return bool(found == magic and stored == checksum(record[_PROLOGUE.size :]))
