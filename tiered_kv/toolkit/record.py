"""The block record: the header that stands before a block wherever a secondary tier keeps it.

`docs/formats.md` describes it byte by byte; golden files in the tests pin it. Whatever is read back is taken for
hostile until its checksum has been verified: nothing here raises on bad bytes, and nothing is allocated on their
word.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.codecs import RAW, Codec, codec_by_id

MAGIC = b"\x89TKVREC\n"  # not text, and broken by whatever strips the eighth bit or translates line ends
FORMAT_VERSION = 1
HEADER_BYTES = 128
DIGEST_BYTES = 16

# magic, version, codec, flags, key id, reserved, raw bytes, payload bytes, namespace, key, checksum, reserved
_LAYOUT = struct.Struct("<8sHHIIIQQ16s16s16s40s")
_CHECKSUM_OFFSET = 72
_NO_CHECKSUM = bytes(DIGEST_BYTES)
_RESERVED = bytes(40)
assert _LAYOUT.size == HEADER_BYTES

Bytes = bytes | bytearray | memoryview


class RecordStatus(Enum):
    """Whether a record is the one that was asked for; the value is the reason's name in the counters."""

    OK = "ok"
    TRUNCATED = "truncated"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_HEADER = "bad_header"
    """A reserved field is not zero, or a flag or key id is set that this version does not know."""
    UNKNOWN_CODEC = "unknown_codec"
    """The record is sound, and there is no such codec here, or its library is not installed."""
    BAD_LENGTH = "bad_length"
    WRONG_NAMESPACE = "wrong_namespace"
    WRONG_KEY = "wrong_key"
    BAD_CHECKSUM = "checksum"
    BAD_PAYLOAD = "bad_payload"
    """The checksum is right and the codec cannot read the payload: a fault of the writer."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a header says; nothing of it has been verified.

    Args:
        codec_id: How the payload was written.
        flags: 0 in this version.
        key_id: Which key encrypted the payload; 0 for none.
        raw_bytes: Bytes of the block.
        payload_bytes: Bytes of the payload, which follow the header.
        namespace_digest: 16 bytes; see `tiered_kv.namespace`.
        key_digest: 16 bytes; see `digest_of`.
        checksum: 16 bytes, XXH3-128 over the header, with this field zero, and the payload.
    """

    codec_id: int
    flags: int
    key_id: int
    raw_bytes: int
    payload_bytes: int
    namespace_digest: bytes
    key_digest: bytes
    checksum: bytes


def digest_of(key: OffloadKey) -> bytes:
    """Return the 16 bytes that stand for `key` in a header: its XXH3-128, seed 0, in canonical order."""
    return xxhash.xxh3_128_digest(key)


def encode_record(
    key: OffloadKey, block: memoryview, namespace_digest: bytes, codec: Codec = RAW
) -> tuple[bytes, memoryview]:
    """Return a block's header and payload, to be written one after the other.

    Where the codec would not make the block shorter, and always with `raw`, the payload is `block` itself, not a copy.

    Args:
        key: The block's key.
        block: The block's bytes, one-dimensional.
        namespace_digest: 16 bytes.
        codec: How to write the payload.
    """
    payload = codec.encode(block)
    codec_id = codec.codec_id
    if payload is None:
        payload, codec_id = block, RAW.codec_id
    return _header(key, codec_id, len(block), payload, namespace_digest), payload


def read_header(header: Bytes) -> RecordHeader | RecordStatus:
    """Return what the first 128 bytes of a record say, or why they are no header of this version."""
    if len(header) < HEADER_BYTES:
        return RecordStatus.TRUNCATED
    (
        magic,
        version,
        codec_id,
        flags,
        key_id,
        reserved,
        raw_bytes,
        payload_bytes,
        namespace_digest,
        key_digest,
        checksum,
        reserved_tail,
    ) = _LAYOUT.unpack_from(header)
    if magic != MAGIC:
        return RecordStatus.BAD_MAGIC
    if version != FORMAT_VERSION:
        return RecordStatus.BAD_VERSION
    if flags or key_id or reserved or reserved_tail != _RESERVED:
        return RecordStatus.BAD_HEADER
    if payload_bytes > raw_bytes:  # what does not get shorter is kept raw
        return RecordStatus.BAD_LENGTH
    return RecordHeader(codec_id, flags, key_id, raw_bytes, payload_bytes, namespace_digest, key_digest, checksum)


def check_header(header: RecordHeader, key: OffloadKey, block_bytes: int, namespace_digest: bytes) -> RecordStatus:
    """Return OK if the header is that of a block of `block_bytes` under `key`, else what is wrong.

    A reader that fetches a payload separately calls this first: `payload_bytes` is then at most `block_bytes`,
    and exactly that where `codec_id` is 0, so that the payload may be read straight into its block.
    """
    if header.namespace_digest != namespace_digest:
        return RecordStatus.WRONG_NAMESPACE
    if header.key_digest != digest_of(key):
        return RecordStatus.WRONG_KEY
    if header.raw_bytes != block_bytes:
        return RecordStatus.BAD_LENGTH
    if header.codec_id == RAW.codec_id and header.payload_bytes != block_bytes:
        return RecordStatus.BAD_LENGTH
    return RecordStatus.OK


def decode_record(
    header: Bytes, payload: Bytes, key: OffloadKey, block: memoryview, namespace_digest: bytes
) -> RecordStatus:
    """Verify a record and put its block into place. Any status but OK is a miss, and leaves `block` undefined.

    Args:
        header: The record's first 128 bytes.
        payload: The bytes after them, one-dimensional, without anything that may follow. Where a raw payload has
            already been read into `block`, pass `block` itself: nothing is copied then.
        key: The key that was asked for.
        block: Where the block belongs, one-dimensional and writable, of the block's size.
        namespace_digest: 16 bytes.
    """
    if payload is block and header == _header(key, RAW.codec_id, len(block), block, namespace_digest):
        return RecordStatus.OK  # it has the one header that a raw block has; what follows finds out why another has not
    parsed = read_header(header)
    if isinstance(parsed, RecordStatus):
        return parsed
    status = check_header(parsed, key, len(block), namespace_digest)
    if status is not RecordStatus.OK:
        return status
    if len(payload) != parsed.payload_bytes:
        return RecordStatus.TRUNCATED if len(payload) < parsed.payload_bytes else RecordStatus.BAD_LENGTH
    codec = codec_by_id(parsed.codec_id)
    if codec is RAW:
        if payload is not block:
            block[:] = payload
        payload = block  # verify what has landed, so that nothing can change between the check and the copy
    elif payload is block:
        return RecordStatus.BAD_PAYLOAD
    unsigned = bytearray(header[:HEADER_BYTES])
    unsigned[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + DIGEST_BYTES] = _NO_CHECKSUM
    if _checksum(unsigned, payload) != parsed.checksum:
        return RecordStatus.BAD_CHECKSUM
    if codec is None:
        return RecordStatus.UNKNOWN_CODEC
    if codec is not RAW and not codec.decode(memoryview(payload), block):
        return RecordStatus.BAD_PAYLOAD
    return RecordStatus.OK


def _header(key: OffloadKey, codec_id: int, raw_bytes: int, payload: Bytes, namespace_digest: bytes) -> bytes:
    fields = (codec_id, 0, 0, 0, raw_bytes, len(payload), namespace_digest, digest_of(key))
    unsigned = _LAYOUT.pack(MAGIC, FORMAT_VERSION, *fields, _NO_CHECKSUM, _RESERVED)
    return b"".join(
        (unsigned[:_CHECKSUM_OFFSET], _checksum(unsigned, payload), unsigned[_CHECKSUM_OFFSET + DIGEST_BYTES :])
    )


def _checksum(unsigned_header: Bytes, payload: Bytes) -> bytes:
    state = xxhash.xxh3_128(unsigned_header)
    state.update(payload)
    return state.digest()
