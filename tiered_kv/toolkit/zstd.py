"""The codec `zstd`: a block's bytes at even offsets and its bytes at odd offsets, each as one Zstandard frame.

`CodecSet` calls it on the thread that stores or loads a block. Any version can read every payload: only the writer
chooses how to make a frame. `docs/reference/formats.md` describes the payload.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiered_kv.errors import MissingExtraError
from tiered_kv.reasons import RecordStatus

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

_LEVEL: Final = 1
"""Higher levels gain nothing on KV blocks, whose mantissas are noise, and take up to three times as long."""
_FEW_VALUES_HASH_LOG: Final = 7
"""Where bytes have few values, short sequences repeat by chance. To encode these takes more bytes than to encode each
value by its frequency, and three times as long. With a table of 128 places, few of them are found."""
_SAMPLE_BYTES: Final = 64
_FEW_VALUES: Final = 22
"""Of a sample. The upper bytes of real bfloat16 keys and values have 8 to 14, the bytes of other data types 30 or
more."""
_WINDOW_BYTES_MIN: Final = 1 << 20
_FRAME_LENGTH_BYTES: Final = 4

Plane = np.ndarray[Any, np.dtype[np.uint8]]


class _Contexts(threading.local):
    """The library's contexts of each calling thread, which take longer to make than a small block to compress."""

    def __init__(self, zstandard: ModuleType) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, hash_log=_FEW_VALUES_HASH_LOG)
        self.for_few_values = zstandard.ZstdCompressor(compression_params=parameters)
        self.for_many_values = zstandard.ZstdCompressor(level=_LEVEL)
        self._zstandard = zstandard
        self._window_bytes = 0

    def decompressor(self, plane_bytes: int) -> ZstdDecompressor:
        """Return a decompressor whose window is at most a plane, or 1 MiB. All blocks of a tier have one size."""
        window_bytes = max(_WINDOW_BYTES_MIN, plane_bytes)
        if window_bytes != self._window_bytes:
            self._decompressor: ZstdDecompressor = self._zstandard.ZstdDecompressor(max_window_size=window_bytes)
            self._window_bytes = window_bytes
        return self._decompressor


class Zstd:
    """Compresses the bytes at even offsets and the bytes at odd offsets separately. Any thread may call.

    In 16-bit floats one byte holds the exponent, which compresses, and the other byte mantissa, which does not.
    Separate Huffman tables save about a tenth of the block.
    Raises `MissingExtraError`: the zstandard library is not installed.
    """

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtraError("codec 'zstd'", "zstd") from error
        self._zstandard = zstandard
        self._contexts = _Contexts(zstandard)

    def compress(self, block: memoryview) -> bytes:
        """Return the payload, which may be longer than the block."""
        odd_plane = _every_other(block[1:])
        has_few_values = _has_few_values(odd_plane)
        compressor = self._contexts.for_few_values if has_few_values else self._contexts.for_many_values
        evens, odds = compressor.compress(_every_other(block)), compressor.compress(odd_plane)
        return b"".join((len(evens).to_bytes(_FRAME_LENGTH_BYTES, "little"), evens, odds))

    def decompress(self, payload: memoryview, block: memoryview) -> RecordStatus:
        """See `CodecSet.decode`."""
        first = _FRAME_LENGTH_BYTES + int.from_bytes(payload[:_FRAME_LENGTH_BYTES], "little")
        pairs = len(block) // 2
        decompressor = self._contexts.decompressor(len(block) - pairs)
        evens = self._plane(decompressor, payload[_FRAME_LENGTH_BYTES:first], len(block) - pairs)
        odds = self._plane(decompressor, payload[first:], pairs)
        if evens is None or odds is None:
            return RecordStatus.BAD_PAYLOAD
        _interleave(evens, odds, block)
        return RecordStatus.OK

    def _plane(self, decompressor: ZstdDecompressor, frame: memoryview, size: int) -> Plane | None:
        try:
            # The library allocates the content size that a frame states, so that is checked first.
            if self._zstandard.frame_content_size(frame) != size:
                return None
            plane = np.frombuffer(decompressor.decompress(frame, allow_extra_data=False), dtype=np.uint8)
        except self._zstandard.ZstdError:
            return None
        return plane if len(plane) == size else None


def _every_other(block: memoryview) -> Plane:
    """Return the bytes at even offsets. To cut 16-bit words is faster than to take every second byte."""
    pairs = len(block) // 2
    plane = np.empty(len(block) - pairs, dtype=np.uint8)
    plane[:pairs] = np.frombuffer(block, dtype="<u2", count=pairs)
    if len(plane) > pairs:
        plane[-1] = block[-1]
    return plane


def _interleave(evens: Plane, odds: Plane, block: memoryview) -> None:
    """Undo `_every_other`, in two passes over 16-bit words."""
    pairs = len(odds)
    if pairs:
        block[0] = 0
        behind = np.frombuffer(block[1:], dtype="<u2", count=(len(block) - 1) // 2)
        behind[:] = odds[: len(behind)]  # each with a zero behind it, at an even offset
        block[-1] = int(odds[-1])
        words = np.frombuffer(block, dtype="<u2", count=pairs)
        words |= evens[:pairs]
    if len(evens) > pairs:
        block[-1] = int(evens[-1])


def _has_few_values(plane: Plane) -> bool:
    """Whether a plane has as few values as the exponents of bfloat16. A codec does not know the data type."""
    step = len(plane) // _SAMPLE_BYTES | 1  # odd, to sample all channels
    return len(set(plane[::step].tobytes())) < _FEW_VALUES
