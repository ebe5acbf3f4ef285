"""Codecs: lossless transformations of a block's bytes for storage.

A record names its codec by number; a configuration names it by word. `formats.md` has both, and the form of
each payload. Those that encrypt are in `tiered_kv.toolkit.encryption`. A tier has its
`CodecSet`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.toolkit.status import RecordStatus

_ZSTD_LEVEL = 1
"""Higher levels gain nothing on key/value blocks, whose mantissas are noise, and take up to three times as long."""

_WINDOW_BYTES_MIN = 1 << 20
_FRAME_LENGTH_BYTES = 4


RAW_ID: Final = 0
ZSTD_ID: Final = 1
AES_ID: Final = 2
ZSTD_AES_ID: Final = 3

ENCRYPTED_IDS: Final = frozenset({AES_ID, ZSTD_AES_ID})

OVERHEAD_BYTES_MAX: Final = 56
"""Bytes by which a payload of any codec may exceed its block: an envelope of `tiered_kv.toolkit.encryption`."""


def payload_bytes_range(codec_id: int, raw_bytes: int) -> range:
    """Return the possible lengths of a payload of a block of `raw_bytes`; all lengths for an unknown codec.

    Only `raw` has the length of the block, so a reader may read a payload of that length into the block's place.
    """
    if codec_id == RAW_ID:
        return range(raw_bytes, raw_bytes + 1)
    if codec_id == ZSTD_ID:
        return range(raw_bytes)
    if codec_id == AES_ID:
        return range(raw_bytes + OVERHEAD_BYTES_MAX, raw_bytes + OVERHEAD_BYTES_MAX + 1)
    if codec_id == ZSTD_AES_ID:
        return range(OVERHEAD_BYTES_MAX, raw_bytes)
    return range(raw_bytes + OVERHEAD_BYTES_MAX + 1)


class Seal(Protocol):
    """Encrypts a draft's content."""

    def encrypt_into(self, draft: Draft, target: memoryview, binding: bytes) -> None:
        """Write the draft's payload into `target`, which is `draft.payload_bytes` long."""


class Draft(NamedTuple):
    """A block that will be stored. Its payload's length is known; an encrypted payload does not exist yet.

    Args:
        codec_id: The codec that the record will name.
        key_id: Which key encrypts it; 0 for none.
        raw_bytes: Bytes of the block.
        payload_bytes: Bytes of the payload.
        content: The payload, or the plain text of an encrypted one. It may be the block itself, not a copy.
        seal: Encrypts it; None if `content` is the payload.
    """

    codec_id: int
    key_id: int
    raw_bytes: int
    payload_bytes: int
    content: memoryview
    seal: Seal | None

    @classmethod
    def plain(cls, codec_id: int, content: memoryview, raw_bytes: int) -> Draft:
        """Return a draft whose payload is `content`."""
        return cls(codec_id, 0, raw_bytes, len(content), content, None)

    def write_into(self, target: memoryview, binding: bytes) -> None:
        """Write the payload.

        Args:
            target: Memory of `payload_bytes`, apart from `content`.
            binding: The payload's namespace and block; see `binding_of`.
        """
        if self.seal is None:
            target[:] = self.content
        else:
            self.seal.encrypt_into(self, target, binding)


def binding_of(namespace_digest: bytes, key: bytes) -> bytes:
    """Return the namespace and block as bytes. An encrypted payload is bound to them, and is a miss elsewhere.

    Args:
        namespace_digest: 16 bytes, so that no two pairs give the same.
        key: The block's whole key.
    """
    return namespace_digest + key


class Codec(Protocol):
    """One way to write a block. Any thread may call, several at once."""

    @property
    def codec_id(self) -> int:
        """The codec's number in a record, 0 to 65535; never given to another codec."""

    @property
    def name(self) -> str:
        """The codec's name in a configuration."""

    @property
    def overhead_bytes(self) -> int:
        """By how many bytes a payload that it writes may exceed its block."""

    def draft(self, block: memoryview) -> Draft:
        """Return how a block will be stored. Compresses, and does not encrypt yet."""

    def decode(self, payload: memoryview, block: memoryview, binding: bytes) -> RecordStatus:
        """Decode `payload` into `block`; return why not, and then `block` is undefined.

        The payload may be hostile: nothing is allocated that is much larger than `block`.
        """


class RawCodec:
    """The block itself."""

    codec_id = RAW_ID
    name = "raw"
    overhead_bytes = 0

    def draft(self, block: memoryview) -> Draft:
        return Draft(self.codec_id, 0, len(block), len(block), block, None)

    def decode(self, payload: memoryview, block: memoryview, binding: bytes) -> RecordStatus:
        if len(payload) != len(block):
            return RecordStatus.BAD_PAYLOAD
        block[:] = payload
        return RecordStatus.OK


class ZstdCodec:
    """Zstandard over the block's two byte planes: the bytes at even offsets, and those at odd ones.

    In 16-bit floats one byte holds the exponent, which compresses, and the other mantissa, which does not. As two
    frames, each with its own Huffman table, they take about a tenth of the block less than as one.

    Raises:
        MissingExtraError: The zstandard library is not installed.
    """

    codec_id = ZSTD_ID
    name = "zstd"
    overhead_bytes = 0

    def __init__(self) -> None:
        self._zstandard = _import_zstandard()

    def draft(self, block: memoryview) -> Draft:
        payload = self.encode(block)
        return RAW.draft(block) if payload is None else Draft.plain(self.codec_id, payload, len(block))

    def encode(self, block: memoryview) -> memoryview | None:
        """Return the payload for a block, or None if it would not be shorter than the block."""
        values = np.frombuffer(block, dtype=np.uint8)
        compressor = self._zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        evens: bytes = compressor.compress(np.ascontiguousarray(values[0::2]).data)
        odds: bytes = compressor.compress(np.ascontiguousarray(values[1::2]).data)
        payload = b"".join((len(evens).to_bytes(_FRAME_LENGTH_BYTES, "little"), evens, odds))
        return memoryview(payload) if len(payload) < len(block) else None

    def decode(self, payload: memoryview, block: memoryview, binding: bytes) -> RecordStatus:
        first = _FRAME_LENGTH_BYTES + int.from_bytes(payload[:_FRAME_LENGTH_BYTES], "little")
        pairs = len(block) // 2
        evens = self._decompress(payload[_FRAME_LENGTH_BYTES:first], len(block) - pairs)
        odds = self._decompress(payload[first:], pairs)
        if evens is None or odds is None:
            return RecordStatus.BAD_PAYLOAD
        # One pass over 16-bit words is three times as fast as two strided ones over bytes.
        words = np.frombuffer(block, dtype="<u2", count=pairs)
        words[:] = odds
        words <<= 8
        words |= evens[:pairs]
        if len(evens) > pairs:
            block[-1] = int(evens[-1])
        return RecordStatus.OK

    def _decompress(self, frame: memoryview, size: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        try:
            # The library allocates what a frame claims to hold, so the claim is checked first.
            if self._zstandard.frame_content_size(frame) != size:
                return None
            decompressor = self._zstandard.ZstdDecompressor(max_window_size=max(_WINDOW_BYTES_MIN, size))
            plane = np.frombuffer(decompressor.decompress(frame, allow_extra_data=False), dtype=np.uint8)
        except self._zstandard.ZstdError:
            return None
        return plane if len(plane) == size else None


RAW: Codec = RawCodec()

_BY_NAME: Mapping[str, tuple[int, Callable[[], Codec]]] = {
    RawCodec.name: (RAW_ID, lambda: RAW),
    ZstdCodec.name: (ZSTD_ID, ZstdCodec),
}


def codec_names() -> list[str]:
    """Return the names of the codecs that need no keys."""
    return list(_BY_NAME)


@functools.cache
def codec_by_name(name: str) -> Codec:
    """Return the codec that a configuration calls `name`, one of those that need no keys.

    Raises:
        ConfigError: There is no such codec.
        MissingExtraError: The library that it needs is not installed.
    """
    if name not in _BY_NAME:
        raise ConfigError(f"there is no codec {name!r}; there are {', '.join(codec_names())}")
    return _BY_NAME[name][1]()


def codec_by_id(codec_id: int) -> Codec | None:
    """Return the codec that a record calls `codec_id`; None if it is unknown, needs keys, or its library is missing."""
    try:
        return next((codec_by_name(name) for name, (number, _) in _BY_NAME.items() if number == codec_id), None)
    except MissingExtraError:
        return None


def _import_zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("codec 'zstd'", "zstd") from error
    return zstandard
