"""The damages of a block record by storage, networks and attackers.

    for damage in record_damages(full=False):
        write(key, damage.apply(read(key)))  # the block must be a counted miss

The fields repeat the table in `formats.md`, to detect a reader and a writer that agree on another format.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import xxhash

SEED = 20
"""The seed of all random choices, so that each run has the same cases."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a header; offset and length are in bytes."""

    name: str  # in the format's table
    offset: int
    length: int
    values: tuple[int, ...] = ()
    """Plausible values of a little-endian number: other versions, codecs and sizes."""

    @property
    def end(self) -> int:
        return self.offset + self.length

    def read(self, data: bytes) -> int:
        return int.from_bytes(data[self.offset : self.end], "little")

    def written(self, data: bytes, value: int) -> bytes:
        """Return `data` with the field set to `value`, modulo the field's size."""
        wrapped = value % (1 << 8 * self.length)
        return data[: self.offset] + wrapped.to_bytes(self.length, "little") + data[self.end :]


RECORD_HEADER_BYTES = 128
RECORD_FIELDS = (
    Field("magic", 0, 8),
    Field("version", 8, 2, (0, 2, 256, 65535)),
    Field("codec", 10, 2, (0, 1, 2, 7, 65535)),
    Field("flags", 12, 4, (1, 1 << 31)),
    Field("key id", 16, 4, (1, 1 << 31)),
    Field("reserved", 20, 4, (1, 1 << 31)),
    Field("raw length", 24, 8, (0, 1, 128, 4096, 1 << 20, 1 << 32, 1 << 63)),
    Field("payload length", 32, 8, (0, 1, 128, 4096, 1 << 20, 1 << 32, 1 << 63)),
    Field("namespace digest", 40, 16),
    Field("key digest", 56, 16),
    Field("checksum", 72, 16),
    Field("reserved tail", 88, 40),
)
_CODEC, _LENGTHS, _CHECKSUM = RECORD_FIELDS[2], RECORD_FIELDS[6:8], RECORD_FIELDS[10]
UNKNOWN_CODEC_ID = 65535
"""A codec that no reader has; 0 to 99 are or will be codecs."""


Change = Callable[[bytes], bytes]


class Kind(Enum):
    """What a damage leaves."""

    BROKEN = "broken"
    """No valid record of this block: no process can load it."""
    UNREADABLE = "unreadable"
    """A valid record in a codec that is not installed here: other processes may load it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage to a stored record."""

    name: str
    apply: Change  # takes a record, header and payload, and returns the damaged bytes
    kind: Kind = Kind.BROKEN


def seal_record(data: bytes) -> bytes:
    """Return a record with a right checksum for its bytes, as a faulty writer would make it."""
    unsigned = _CHECKSUM.written(data, 0)
    digest = xxhash.xxh3_128_digest(unsigned)
    return unsigned[: _CHECKSUM.offset] + digest + unsigned[_CHECKSUM.end :]


def record_damages(*, full: bool) -> list[Damage]:
    """Return the damages of a block record, with unique names; the same ones in every run.

    With `full` they are every bit of every field and a hundred places in the payload; otherwise a few of each.
    """
    found = [damage for field in RECORD_FIELDS for damage in field_damages(field, full=full)]
    found += _sealed_fields(full=full)
    found += _cuts(full=full)
    found += _payload_damages(100 if full else 6)
    assert len({damage.name for damage in found}) == len(found), "two damages have one name"
    return found


def field_damages(field: Field, *, full: bool) -> Iterator[Damage]:
    """Yield damages of one field that do not correct the checksum; some may not change a record.

    With `full` they are every bit, and every byte set to 0, 255 and its complement; otherwise three bits.
    """
    name = field.name
    first, last = 8 * field.offset, 8 * field.end - 1
    for bit in range(first, last + 1) if full else sorted({first, (first + last) // 2, last}):
        yield Damage(f"{name}: bit {bit - first} flipped", _flip(bit))
    for at in range(field.offset, field.end) if full else ():
        for value in (0x00, 0xFF):
            yield Damage(f"{name}: byte {at - field.offset} = {value}", _overwrite(at, bytes([value])))
        yield Damage(f"{name}: byte {at - field.offset} inverted", _invert(at))
    for label, change in _values_of(field):
        yield Damage(f"{name} = {label}", _set(field, change))


def _values_of(field: Field) -> list[tuple[str, Callable[[int], int]]]:
    """Return labels, and functions from a field's value to another one."""
    ones = (1 << 8 * field.length) - 1
    found: list[tuple[str, Callable[[int], int]]] = [("zeros", lambda _: 0), ("ones", lambda _: ones)]
    if field.values:
        found += [("one more", lambda value: value + 1), ("one less", lambda value: value - 1)]
        found += [("half", lambda value: value // 2), ("double", lambda value: 2 * value)]
        found += [(str(fixed), lambda _, fixed=fixed: fixed) for fixed in field.values]  # type: ignore[misc]
    return found


def _sealed_fields(*, full: bool) -> Iterator[Damage]:
    """Yield changed fields under a right checksum."""
    for field in RECORD_FIELDS:
        if field is _CHECKSUM:
            continue
        for label, value in _values_of(field):
            if field is _CODEC and label not in ("zeros", "0", "1"):
                continue  # a future codec may accept the payload, or need a key
            yield Damage(f"sealed {field.name} = {label}", _sealed(_set(field, value)))
        for bit in range(8 * field.offset, 8 * field.end) if full and field is not _CODEC else ():
            yield Damage(f"sealed {field.name}: bit {bit - 8 * field.offset} flipped", _sealed(_flip(bit)))
    yield Damage("sealed, and in an unknown codec", _sealed(_in_unknown_codec), Kind.UNREADABLE)
    for field in _LENGTHS:
        for step in (-128, -16, -1, 1, 16, 128):
            set_to = _set(field, lambda value, step=step: value + step)  # type: ignore[misc]
            yield Damage(f"sealed {field.name} {step:+}, and as many bytes", _sealed(_resized(step, set_to)))


def _cuts(*, full: bool) -> Iterator[Damage]:
    boundaries = sorted({field.offset for field in RECORD_FIELDS} | {RECORD_HEADER_BYTES})
    for size in range(RECORD_HEADER_BYTES + 1) if full else boundaries:
        yield Damage(f"cut to {size} bytes", lambda data, size=size: data[:size])  # type: ignore[misc]
    for part in (1, 2, 3):
        yield Damage(f"payload cut to {part}/4", lambda data, part=part: data[: _at(data, part / 4)])  # type: ignore[misc]
    for count in (1, 2, 16, 4096):
        yield Damage(f"the last {count} bytes cut off", lambda data, count=count: data[:-count])  # type: ignore[misc]
        yield Damage(f"{count} zeros appended", lambda data, count=count: data + bytes(count))  # type: ignore[misc]
        yield Damage(f"the first {count} bytes cut off", lambda data, count=count: data[count:])  # type: ignore[misc]
        yield Damage(f"{count} zeros before", lambda data, count=count: bytes(count) + data)  # type: ignore[misc]
    yield Damage("appended to itself", lambda data: 2 * data)
    yield Damage("all zeros", lambda data: bytes(len(data)))
    yield Damage("header only zeros", lambda data: bytes(RECORD_HEADER_BYTES) + data[RECORD_HEADER_BYTES:])


def _payload_damages(samples: int) -> Iterator[Damage]:
    chance = random.Random(SEED)
    places = [("first", 0.0), ("last", 1.0)] + [(f"sample {number}", chance.random()) for number in range(samples)]
    for label, part in places:
        bit = chance.randrange(8)
        yield Damage(f"payload: bit {bit} of the {label} byte flipped", _payload_flip(part, bit))
    yield Damage("payload all zeros", lambda data: data[:RECORD_HEADER_BYTES] + bytes(_payload_bytes(data)))
    yield Damage("payload: a page of zeros in it", lambda data: _overwrite(_at(data, 0.4), bytes(512))(data))
    yield Damage("payload: turned by one byte", _turned)


def _flip(bit: int) -> Change:
    return _invert(bit // 8, 1 << bit % 8)


def _invert(at: int, mask: int = 0xFF) -> Change:
    return lambda data: data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def _overwrite(at: int, piece: bytes) -> Change:
    return lambda data: (data[:at] + piece + data[at + len(piece) :])[: len(data)]


def _set(field: Field, value: Callable[[int], int]) -> Change:
    return lambda data: field.written(data, value(field.read(data)))


def _sealed(change: Change) -> Change:
    return lambda data: seal_record(change(data))


def _in_unknown_codec(data: bytes) -> bytes:
    """Return the record of an unknown codec, with half of the payload."""
    shorter = _LENGTHS[1].written(data, _payload_bytes(data) // 2)
    return _CODEC.written(shorter, UNKNOWN_CODEC_ID)[: _at(data, 0) + _payload_bytes(data) // 2]


def _resized(step: int, change: Change) -> Change:
    return lambda data: (change(data) + bytes(max(0, step)))[: len(data) + step]


def _payload_flip(part: float, bit: int) -> Change:
    return lambda data: _flip(8 * min(_at(data, part), len(data) - 1) + bit)(data)


def _turned(data: bytes) -> bytes:
    payload = data[RECORD_HEADER_BYTES:]
    return data[:RECORD_HEADER_BYTES] + payload[-1:] + payload[:-1]


def _payload_bytes(data: bytes) -> int:
    return len(data) - RECORD_HEADER_BYTES


def _at(data: bytes, part: float) -> int:
    """Return an offset in the payload, `part` of its length from its beginning."""
    return RECORD_HEADER_BYTES + int(part * _payload_bytes(data))
