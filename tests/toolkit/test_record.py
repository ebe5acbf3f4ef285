"""The block record: golden files pin its format, and no change of a byte passes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.damage import seal_record
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.testing.control import ManualClock
from tiered_kv.toolkit import record
from tiered_kv.toolkit.codecs import CODEC_IDS, ENCRYPTED_IDS, PLAIN, RAW_ID, CodecSet
from tiered_kv.toolkit.encryption import Cipher
from tiered_kv.toolkit.record import (
    FORMAT_VERSION,
    HEADER_BYTES,
    UNREADABLE_S,
    RecordHeader,
    RecordStatus,
    Unreadable,
    decode_record,
    encode_record,
    read_header,
    record_bytes_max,
)

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = bytes(range(16))
KEY = make_offload_key(bytes(range(32)), 3)
OTHER_KEY = make_offload_key(bytes(range(32)), 4)
BLOCK = b"".join(value.to_bytes(2, "little") for value in range(256))  # 512 bytes, compressible in planes
SECRET = bytes(range(100, 132))
CIPHER = Cipher({7: SECRET}, 7)
CODECS = {name: CodecSet(name, CIPHER) for name in CODEC_IDS}
READERS = CODECS["raw"]  # reads them all


def record_of(block: bytes, codecs: CodecSet = PLAIN, key: OffloadKey = KEY, namespace: bytes = NAMESPACE) -> bytes:
    header, payload = encode_record(key, memoryview(block), namespace, codecs)
    return header + bytes(payload)


def decode(
    record: bytes, size: int = len(BLOCK), key: OffloadKey = KEY, namespace: bytes = NAMESPACE
) -> tuple[RecordStatus, bytes]:
    out = bytearray(size)
    status = decode_record(record[:HEADER_BYTES], record[HEADER_BYTES:], key, memoryview(out), namespace, READERS)
    return status, bytes(out)


@pytest.mark.parametrize("name", CODECS)
def test_the_format_is_that_of_the_golden_files(name: str) -> None:
    """A mismatch means that stored blocks became unreadable.

    Either undo the change, or raise FORMAT_VERSION, describe the new one in formats.md, and write the new
    files: `record_of(BLOCK, CODECS[name])` to `golden/record-v<version>-<name>.bin`.
    """
    golden = (GOLDEN / f"record-v{FORMAT_VERSION}-{name}.bin").read_bytes()
    assert decode(golden) == (RecordStatus.OK, BLOCK)
    # Compressors may differ from release to release in the frames they write, never in those they read; and no two
    # envelopes are the same. `test_encryption.py` compares one whose salt and nonce are known.
    compared = len(golden) if name == "raw" else 24
    assert record_of(BLOCK, CODECS[name])[:compared] == golden[:compared]


@given(block=st.binary(max_size=400), key=st.binary(min_size=4, max_size=80), name=st.sampled_from(list(CODECS)))
def test_a_record_gives_back_its_block(block: bytes, key: bytes, name: str) -> None:
    record = record_of(block, CODECS[name], OffloadKey(key))
    assert decode(record, len(block), OffloadKey(key)) == (RecordStatus.OK, block)


@pytest.mark.parametrize("name", CODECS)
def test_a_change_of_any_bit_is_detected(name: str) -> None:
    record = bytearray(record_of(BLOCK, CODECS[name]))
    for position in range(len(record)):
        for bit in range(8):
            record[position] ^= 1 << bit
            assert decode(bytes(record))[0] is not RecordStatus.OK, (position, bit)
            record[position] ^= 1 << bit
    assert decode(bytes(record))[0] is RecordStatus.OK


@pytest.mark.parametrize("name", CODECS)
def test_a_truncated_record_is_detected(name: str) -> None:
    record = record_of(BLOCK, CODECS[name])
    for size in range(len(record)):
        assert decode(record[:size])[0] is RecordStatus.TRUNCATED


def test_another_blocks_record_and_one_with_a_tail_are_refused() -> None:
    assert decode(record_of(BLOCK) + b"x")[0] is RecordStatus.BAD_LENGTH
    assert decode(record_of(BLOCK, PLAIN, OTHER_KEY))[0] is RecordStatus.WRONG_KEY
    assert decode(record_of(BLOCK, namespace=bytes(16)))[0] is RecordStatus.WRONG_NAMESPACE
    assert decode(record_of(BLOCK[:-1]))[0] is RecordStatus.BAD_LENGTH
    one, other = record_of(BLOCK), record_of(BLOCK[::-1], PLAIN, OTHER_KEY)
    assert decode(one[:HEADER_BYTES] + other[HEADER_BYTES:])[0] is RecordStatus.BAD_CHECKSUM
    assert decode(other[:HEADER_BYTES] + one[HEADER_BYTES:])[0] is RecordStatus.WRONG_KEY


@pytest.mark.parametrize(
    ("offset", "status"),
    [
        (0, RecordStatus.BAD_MAGIC),
        (8, RecordStatus.BAD_VERSION),
        (11, RecordStatus.BAD_CHECKSUM),
        (12, RecordStatus.BAD_HEADER),
        (16, RecordStatus.BAD_HEADER),
        (20, RecordStatus.BAD_HEADER),
        (24, RecordStatus.BAD_LENGTH),
        (32, RecordStatus.BAD_LENGTH),
        (39, RecordStatus.BAD_LENGTH),
        (40, RecordStatus.WRONG_NAMESPACE),
        (56, RecordStatus.WRONG_KEY),
        (72, RecordStatus.BAD_CHECKSUM),
        (88, RecordStatus.BAD_HEADER),
        (127, RecordStatus.BAD_HEADER),
        (128, RecordStatus.BAD_CHECKSUM),
    ],
)
def test_each_field_has_its_offset_and_its_status(offset: int, status: RecordStatus) -> None:
    record = bytearray(record_of(BLOCK))
    record[offset] ^= 0x01
    assert decode(bytes(record))[0] is status


def test_only_a_sound_record_is_of_an_unknown_codec() -> None:
    """A damaged codec number must not keep a damaged record in shared storage."""
    record = bytearray(record_of(BLOCK))
    record[10:12] = (65_000).to_bytes(2, "little")
    record = bytearray(seal_record(bytes(record)))
    assert decode(bytes(record))[0] is RecordStatus.UNKNOWN_CODEC
    record[-1] ^= 0x01
    assert decode(bytes(record))[0] is RecordStatus.BAD_CHECKSUM


def test_a_raw_payload_is_verified_where_it_landed() -> None:
    landed = bytearray(BLOCK)
    block = memoryview(landed)
    header, payload = encode_record(KEY, block, NAMESPACE)
    assert payload is block
    assert decode_record(header, block, KEY, block, NAMESPACE) is RecordStatus.OK
    landed[100] ^= 1
    assert decode_record(header, block, KEY, block, NAMESPACE) is RecordStatus.BAD_CHECKSUM


@pytest.mark.parametrize("name", CODECS)
def test_only_a_raw_payload_is_as_long_as_its_block(name: str) -> None:
    """So a reader may read a payload of that length straight into the block."""
    for block in (*map(bytes, (0, 1, 55, 56, 57, 200)), *(BLOCK[:size] for size in range(64, 512, 7))):
        record = record_of(block, CODECS[name])
        parsed = read_header(record[:HEADER_BYTES])
        assert isinstance(parsed, RecordHeader)
        assert (parsed.payload_bytes == len(block)) == (parsed.codec_id == RAW_ID)
        assert len(record) <= record_bytes_max(len(block))
        assert decode(record, len(block)) == (RecordStatus.OK, block)


def test_a_key_id_stands_where_there_is_a_key() -> None:
    for name, codecs in CODECS.items():
        is_encrypted = CODEC_IDS[name] in ENCRYPTED_IDS
        record = bytearray(record_of(BLOCK, codecs))
        parsed = read_header(record)
        assert isinstance(parsed, RecordHeader)
        assert parsed.key_id == (7 if is_encrypted else 0)
        record[16:20] = bytes(4) if is_encrypted else b"\x07\0\0\0"
        assert read_header(record) is RecordStatus.BAD_HEADER


def test_a_name_is_dropped_after_its_lifetime_from_when_it_was_noted_last(clock: ManualClock) -> None:
    names: Unreadable[str] = Unreadable(clock=clock)
    names.note(["once", "twice"])
    clock.advance(UNREADABLE_S - 1)
    names.note(["twice"])
    assert "once" in names
    clock.advance(1)
    assert "once" not in names
    assert "twice" in names
    clock.advance(UNREADABLE_S - 1)
    assert "twice" not in names


def test_beyond_the_limit_the_name_that_was_noted_longest_ago_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "UNREADABLE_MAX", 3)
    names: Unreadable[int] = Unreadable()
    names.note(range(3))
    names.note([0])  # again
    names.note([3, 4])
    assert [number for number in range(5) if number in names] == [0, 3, 4]
    names.note(range(1000))
    assert [number for number in range(1000) if number in names] == [997, 998, 999]


def test_threads_may_note_forget_and_ask_at_once() -> None:
    names: Unreadable[int] = Unreadable()

    def work(mine: range) -> None:
        for _ in range(200):
            names.note(mine)
            assert all(name in names for name in mine)
            names.forget(mine)
            assert not any(name in names for name in mine)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [range(at * 10, at * 10 + 10) for at in range(4)]))
