"""Fuzzing of the block record: a read returns the stored block or an error, whatever the bytes."""

from __future__ import annotations

from unittest import mock

from tests.support.damage import seal_record
from tests.support.fuzzing import Target
from tiered_kv.testing.rig import block_content, compressible_content, make_keys
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.encryption import Cipher
from tiered_kv.toolkit.record import HEADER_BYTES, RecordHeader, RecordStatus, decode_record, encode_record, read_header

BLOCK_BYTES = 512
NAMESPACE = bytes(range(16))
(KEY,) = make_keys(1, "fuzz")
_PLAIN, _SEALED, _ENCRYPTED = b"\0", b"\1", b"\2"
_GUARD = 64
_CIPHER = Cipher({1: bytes(range(32))}, 1)
_CODECS = CodecSet("aes-256-gcm", _CIPHER)


def make() -> Target:
    """Return the target: one byte for the mode, then a record."""
    contents = (block_content(KEY, BLOCK_BYTES), compressible_content(KEY, BLOCK_BYTES), bytes(BLOCK_BYTES))
    records = [_record(content, codec) for content in contents for codec in ("raw", "zstd")]
    seeds = tuple(mode + record for record in records for mode in (_PLAIN, _SEALED))
    with mock.patch("os.urandom", bytes):  # the same seeds each time
        encrypting = ("aes-256-gcm", "zstd+aes-256-gcm")
        seeds += tuple(_ENCRYPTED + _record(content, codec) for content in contents for codec in encrypting)
    frame = records[3][HEADER_BYTES + 4 : HEADER_BYTES + 20]
    return Target("fuzz/record", seeds, _run, (frame, b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", bytes(16)))


def _record(content: bytes, codec: str) -> bytes:
    header, payload = encode_record(KEY, memoryview(content), NAMESPACE, CodecSet(codec, _CIPHER))
    return header + bytes(payload)


def _run_encrypted(record: bytes) -> None:
    """Read a record whose checksum is made right: without the key nobody can make a valid one."""
    if len(record) < HEADER_BYTES:
        return
    record = seal_record(record)
    block = memoryview(bytearray(BLOCK_BYTES))
    status = decode_record(record[:HEADER_BYTES], record[HEADER_BYTES:], KEY, block, NAMESPACE, _CODECS)
    assert status is not RecordStatus.OK or bytes(block) in _CONTENTS, "wrong bytes"


def _run(data: bytes) -> None:
    record = data[1:]
    if data[:1] == _ENCRYPTED:
        _run_encrypted(record)
        return
    sealed = data[:1] == _SEALED and len(record) >= HEADER_BYTES
    if sealed:
        record = seal_record(record)
    memory = bytearray(b"\xa5" * (BLOCK_BYTES + 2 * _GUARD))
    block = memoryview(memory)[_GUARD:-_GUARD]
    header = read_header(record[:HEADER_BYTES])
    assert isinstance(header, RecordHeader | RecordStatus)
    status = decode_record(record[:HEADER_BYTES], record[HEADER_BYTES:], KEY, block, NAMESPACE)
    assert memory[:_GUARD] == memory[-_GUARD:] == b"\xa5" * _GUARD, "it wrote beside the block"
    if status is RecordStatus.OK:
        assert record == seal_record(record), "the checksum is another"
        assert not isinstance(header, RecordHeader) or header.codec_id or bytes(block) == record[HEADER_BYTES:]
        assert sealed or bytes(block) in _CONTENTS, "wrong bytes"
    # A payload of the block's size may have been read into its place.
    landed = bytearray(record[HEADER_BYTES : HEADER_BYTES + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0"))
    in_place = memoryview(landed)
    if len(record) == HEADER_BYTES + BLOCK_BYTES:
        again = decode_record(record[:HEADER_BYTES], in_place, KEY, in_place, NAMESPACE)
        assert (again is RecordStatus.OK) == (status is RecordStatus.OK), f"{status} and {again}"
        assert again is not RecordStatus.OK or landed == bytes(block), "wrong bytes in place"


_CONTENTS = frozenset({block_content(KEY, BLOCK_BYTES), compressible_content(KEY, BLOCK_BYTES), bytes(BLOCK_BYTES)})
