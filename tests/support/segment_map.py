"""A map of an nvme tier's segment file: the meaning of each byte, so that a test knows what a damage may cost.

A second reader of the format, written from `formats-nvme.md` without the tier's code. The file must be valid.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import xxhash

from tests.support.damage import Field
from tiered_kv.base import OffloadKey

PAGE_BYTES = 4096
_ENTRY = struct.Struct("<QIHH16s")

_MAGIC, _SUM = Field("magic", 0, 8), Field("checksum", 8, 16)
_SIZES = (0, 1, 4095, 4097, 1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 4096, 1 << 63)
_NUMBERS = (0, 1, 2, (1 << 63) - 1, 1 << 63)

_WHOSE = (
    Field("namespace digest", 32, 16),
    Field("generation", 48, 8, _NUMBERS),
    Field("epoch", 56, 8, _NUMBERS),
    Field("sequence", 64, 8, _NUMBERS),
)

SEGMENT_FIELDS = (
    _MAGIC,
    _SUM,
    Field("format version", 24, 4, (0, 2, 65535)),
    Field("page size", 28, 4, (0, 1, 512, 8192)),
    Field("namespace digest", 32, 16),
    Field("generation", 48, 8, _NUMBERS),
    Field("segment size", 56, 8, _SIZES),
    Field("block size", 64, 8, _SIZES),
)
BATCH_FIELDS = (
    _MAGIC,
    _SUM,
    Field("header size", 24, 4, (0, 1, 8192, 1 << 31)),
    Field("count", 28, 4, (0, 1, 126, 127, 1 << 16, 1 << 31)),
    *_WHOSE,
    Field("offset", 72, 8, _SIZES),
    Field("batch size", 80, 8, _SIZES),
)
BATCH_FIXED_BYTES = 88
FOOTER_FIELDS = (
    _MAGIC,
    _SUM,
    Field("table size", 24, 4, (0, 1, 8192, 1 << 31)),
    Field("count", 28, 4, (0, 1, 1 << 16, 1 << 31)),
    *_WHOSE,
    Field("end", 72, 8, _SIZES),
    Field("segment size", 80, 8, _SIZES),
    Field("table checksum", 88, 16),
    Field("names size", 104, 4, (1, 64, 4096, 1 << 31)),
)
ENTRY_BYTES = 32


def entry_fields(at: int, label: str) -> tuple[Field, ...]:
    """Return the fields of an entry at `at`."""
    return (
        Field(f"{label}: offset", at, 8, _SIZES),
        Field(f"{label}: stored size", at + 8, 4, (0, 1, 4095, 4096, 4097, 1 << 31)),
        Field(f"{label}: key size", at + 12, 2, (0, 1, 1024, 1025, 65535)),
        Field(f"{label}: codec", at + 14, 2, (0, 1, 65535)),
        Field(f"{label}: checksum", at + 16, 16),
    )


class Part(Enum):
    HEADER = "the segment's header page"
    BATCH_HEADER = "a batch's header, entries, keys and padding"
    PAYLOAD = "a block's payload"
    GAP = "between payloads, or behind the last up to the page: means nothing"
    ROOM = "behind the batches: means nothing"
    TABLE = "the summary's table, padding included"
    FOOTER = "the summary's footer page"


_NOBODY = OffloadKey(b"")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of bytes with one meaning."""

    part: Part
    start: int
    end: int  # left out
    batch: int = -1  # which batch, from 0
    key: OffloadKey = _NOBODY  # whose payload


@dataclass(frozen=True, slots=True)
class Batch:
    offset: int
    end: int
    header_bytes: int
    entries: tuple[tuple[OffloadKey, int, int], ...]  # key, offset and stored size of each block


class SegmentMap:
    """The meaning of each byte of a segment."""

    def __init__(self, data: bytes) -> None:
        assert data[:8] == b"TKVNSEG1", "this is no segment"
        self.data = data
        self.batches = tuple(self._batches())
        self.has_summary = data[-PAGE_BYTES:][:8] == b"TKVNSUM1"
        self.stretches = tuple(self._stretches())
        assert [each.start for each in self.stretches[1:]] == [each.end for each in self.stretches[:-1]]
        assert self.stretches[-1].end == len(data)

    def part_at(self, offset: int) -> Stretch:
        return next(each for each in self.stretches if each.start <= offset < each.end)

    def parts(self, part: Part) -> list[Stretch]:
        return [each for each in self.stretches if each.part is part]

    def _batches(self) -> Iterator[Batch]:
        at = PAGE_BYTES
        while self.data[at : at + 8] == b"TKVNBAT1":
            header_bytes, count = struct.unpack_from("<II", self.data, at + 24)
            (batch_bytes,) = struct.unpack_from("<Q", self.data, at + 80)
            entries = []
            key_at = at + BATCH_FIXED_BYTES + count * ENTRY_BYTES
            for number in range(count):
                entry_at = at + BATCH_FIXED_BYTES + number * ENTRY_BYTES
                offset, stored, key_bytes, _, _ = _ENTRY.unpack_from(self.data, entry_at)
                entries.append((OffloadKey(self.data[key_at : key_at + key_bytes]), offset, stored))
                key_at += key_bytes
            yield Batch(at, at + batch_bytes, header_bytes, tuple(entries))
            at += batch_bytes

    def _stretches(self) -> Iterator[Stretch]:
        yield Stretch(Part.HEADER, 0, PAGE_BYTES)
        at = PAGE_BYTES
        for number, batch in enumerate(self.batches):
            at = batch.offset + batch.header_bytes
            yield Stretch(Part.BATCH_HEADER, batch.offset, at, number)
            for key, offset, stored in sorted(batch.entries, key=lambda entry: entry[1]):
                if offset > at:
                    yield Stretch(Part.GAP, at, offset, number)
                yield Stretch(Part.PAYLOAD, offset, offset + stored, number, key)
                at = offset + stored
            if batch.end > at:
                yield Stretch(Part.GAP, at, batch.end, number)
            at = batch.end
        end = len(self.data)
        if self.has_summary:
            (table_bytes,) = struct.unpack_from("<I", self.data, end - PAGE_BYTES + 24)
            end -= PAGE_BYTES + table_bytes
        if end > at:
            yield Stretch(Part.ROOM, at, end)
        if self.has_summary:
            yield Stretch(Part.TABLE, end, len(self.data) - PAGE_BYTES)
            yield Stretch(Part.FOOTER, len(self.data) - PAGE_BYTES, len(self.data))


def seal(data: bytes, start: int, end: int) -> bytes:
    """Return `data` with a valid checksum in a header, batch header or footer from `start` to `end`."""
    digest = xxhash.xxh3_128_digest(data[start + 24 : end])
    return data[: start + 8] + digest + data[start + 24 :]


def seal_summary(data: bytes) -> bytes:
    """Return `data` with both valid checksums of its summary, if the footer's table size allows it."""
    footer = len(data) - PAGE_BYTES
    (table_bytes,) = struct.unpack_from("<I", data, footer + 24)
    if table_bytes <= footer:
        digest = xxhash.xxh3_128_digest(data[footer - table_bytes : footer])
        data = data[: footer + 88] + digest + data[footer + 104 :]
    return seal(data, footer, len(data))
