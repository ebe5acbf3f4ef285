"""What may be done to a block's bytes on their way into storage. Every codec is lossless.

A record names its codec by number; a configuration names it by word. `docs/formats.md` has both, and the form of
each payload.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import numpy as np

from tiered_kv.errors import ConfigError, MissingExtraError

_ZSTD_LEVEL = 1
"""Higher levels gain nothing on key/value blocks, whose mantissas are noise, and take up to three times as long."""

_WINDOW_BYTES_MIN = 1 << 20
_FRAME_LENGTH_BYTES = 4


class Codec(Protocol):
    """One way to write a block. Any thread may call, several at once."""

    @property
    def codec_id(self) -> int:
        """The codec's number in a record, 0 to 65535; never given to another codec."""

    @property
    def name(self) -> str:
        """The codec's name in a configuration."""

    def encode(self, block: memoryview) -> memoryview | None:
        """Return the payload for a block, or None if it would not be shorter than the block."""

    def decode(self, payload: memoryview, block: memoryview) -> bool:
        """Write the block that `payload` stands for into `block`; return False if it does not stand for one.

        The payload may be hostile: nothing is allocated that is much larger than `block`.
        """


class RawCodec:
    """The block itself."""

    codec_id = 0
    name = "raw"

    def encode(self, block: memoryview) -> memoryview | None:
        return block

    def decode(self, payload: memoryview, block: memoryview) -> bool:
        if len(payload) != len(block):
            return False
        block[:] = payload
        return True


class ZstdCodec:
    """Zstandard over the block's two byte planes: the bytes at even offsets, and those at odd ones.

    In 16-bit floats one byte holds the exponent, which compresses, and the other mantissa, which does not. Apart,
    each with a Huffman table of its own, they take about a tenth of the block less than together.

    Raises:
        MissingExtraError: The zstandard library is not installed.
    """

    codec_id = 1
    name = "zstd"

    def __init__(self) -> None:
        self._zstandard = _import_zstandard()

    def encode(self, block: memoryview) -> memoryview | None:
        values = np.frombuffer(block, dtype=np.uint8)
        compressor = self._zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        evens: bytes = compressor.compress(np.ascontiguousarray(values[0::2]).data)
        odds: bytes = compressor.compress(np.ascontiguousarray(values[1::2]).data)
        payload = b"".join((len(evens).to_bytes(_FRAME_LENGTH_BYTES, "little"), evens, odds))
        return memoryview(payload) if len(payload) < len(block) else None

    def decode(self, payload: memoryview, block: memoryview) -> bool:
        first = _FRAME_LENGTH_BYTES + int.from_bytes(payload[:_FRAME_LENGTH_BYTES], "little")
        pairs = len(block) // 2
        evens = self._decompress(payload[_FRAME_LENGTH_BYTES:first], len(block) - pairs)
        odds = self._decompress(payload[first:], pairs)
        if evens is None or odds is None:
            return False
        # One pass over 16-bit words is three times as fast as two strided ones over bytes.
        words = np.frombuffer(block, dtype="<u2", count=pairs)
        words[:] = odds
        words <<= 8
        words |= evens[:pairs]
        if len(evens) > pairs:
            block[-1] = int(evens[-1])
        return True

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

_TYPES: tuple[type[RawCodec] | type[ZstdCodec], ...] = (RawCodec, ZstdCodec)
_LOADED: dict[int, Codec] = {RAW.codec_id: RAW}


def codec_names() -> list[str]:
    """Return the names that a configuration may use."""
    return [kind.name for kind in _TYPES]


def codec_by_name(name: str) -> Codec:
    """Return the codec that a configuration calls `name`.

    Raises:
        ConfigError: There is no such codec.
        MissingExtraError: The library that it needs is not installed.
    """
    for kind in _TYPES:
        if kind.name == name:
            return _LOADED.get(kind.codec_id) or _LOADED.setdefault(kind.codec_id, kind())
    raise ConfigError(f"there is no codec {name!r}; there are {', '.join(codec_names())}")


def codec_by_id(codec_id: int) -> Codec | None:
    """Return the codec that a record calls `codec_id`; None if it is unknown or its library is not installed."""
    codec = _LOADED.get(codec_id)
    if codec is None:
        for kind in _TYPES:
            if kind.codec_id == codec_id:
                try:
                    codec = _LOADED.setdefault(codec_id, kind())
                except MissingExtraError:
                    return None
    return codec


def _import_zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("codec 'zstd'", "zstd") from error
    return zstandard
