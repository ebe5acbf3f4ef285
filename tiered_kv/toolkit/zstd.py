"""The codec `zstd`: a block's bytes at even offsets and its bytes at odd offsets, each as one Zstandard frame.

`CodecSet` calls it on the thread that stores or loads a block. Any version can read every payload: only the writer
chooses how to make a frame. `docs/reference/formats.md` describes the payload.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np

from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.zstd_library import Compress, Decompress, ZstdLibrary, zstd_library

_FEW_VALUES_HASH_LOG: Final = 7
"""For bytes with few values. Their short sequences repeat by chance. To encode repetitions takes more bytes than to
encode each value by its frequency, and three times as long. With a table of 128 places, zstd finds few repetitions."""
_SHORT_BYTES: Final = 16 << 10  # the longest plane that counts as short
_SHORT_HASH_LOG: Final = 9
"""The table for short planes, of a few rows, has 512 places: few sequences repeat by chance, and whole rows may."""
_SAMPLE_BYTES: Final = 64
_FEW_VALUES: Final = 22
"""A plane has few values if its sample has fewer than this. Samples of the upper bytes of real bfloat16 keys and values
have 8 to 14, of other data types 30 or more."""
_NOISE_VALUES: Final = 48
"""A plane looks like noise if its sample has as many values. A sample has 57 in the mean if all values are equally
frequent, as in the lower bytes of bfloat16."""
_NOISE_PLANES: Final = 15
"""How many planes that look like noise are stored as they are after a plane that did not become smaller. To try takes a
seventh of a block's time."""
_RAW_FRAME: Final = 0xFD2FB528.to_bytes(4, "little") + b"\xa0"  # magic number; descriptor: content size in four bytes
_RAW_PART_BYTES: Final = 1 << 17
_WINDOW_BYTES_MIN: Final = 1 << 20
_FRAME_LENGTH_BYTES: Final = 4

Plane = np.ndarray[Any, np.dtype[np.uint8]]


class _Contexts(threading.local):
    """The library's contexts of each calling thread. To make them takes longer than to compress a small block."""

    def __init__(self, library: ZstdLibrary) -> None:
        self.for_few_values = library.compressor(_FEW_VALUES_HASH_LOG)
        self.for_few_values_of_short_planes = library.compressor(_SHORT_HASH_LOG)
        self.for_many_values = library.compressor()
        self.noise_left = 0
        """How many of the next planes that look like noise are not compressed."""
        self._library = library
        self._window_bytes = 0

    def compressor(self, plane: Plane, has_few_values: bool) -> Compress:
        if not has_few_values:
            return self.for_many_values
        return self.for_few_values if len(plane) > _SHORT_BYTES else self.for_few_values_of_short_planes

    def decompressor(self, plane_bytes: int) -> Decompress:
        """Return a decompressor whose window is at most a plane, or 1 MiB if that is more. A tier has one size of
        blocks."""
        window_bytes = max(_WINDOW_BYTES_MIN, plane_bytes)
        if window_bytes != self._window_bytes:
            self._decompressor = self._library.decompressor(window_bytes)
            self._window_bytes = window_bytes
        return self._decompressor


class Zstd:
    """Compresses the bytes at even offsets and the bytes at odd offsets separately. Any thread may call.

    In 16-bit floats one byte holds the exponent, which compresses, and the other byte mantissa, which does not.
    Separate Huffman tables save about a tenth of the block.
    Raises `MissingExtraError`: see `zstd_library`.
    """

    def __init__(self) -> None:
        self._contexts = _Contexts(zstd_library())

    def compress(self, block: memoryview) -> bytes:
        """Return the payload, which may be longer than the block."""
        odd_plane, contexts = _every_other(block[1:]), self._contexts
        has_few_values = _values(odd_plane) < _FEW_VALUES
        compress = contexts.compressor(odd_plane, has_few_values)
        odds, even_plane = compress(odd_plane), _every_other(block)
        may_be_noise = has_few_values and len(even_plane) > _SHORT_BYTES
        evens: list[bytes | memoryview]
        if may_be_noise and contexts.noise_left and _values(even_plane) >= _NOISE_VALUES:
            contexts.noise_left -= 1
            evens = _raw_frame(even_plane)
        else:
            evens = [compress(even_plane)]
            contexts.noise_left = _NOISE_PLANES if may_be_noise and len(evens[0]) >= len(even_plane) else 0
        return b"".join((sum(map(len, evens)).to_bytes(_FRAME_LENGTH_BYTES, "little"), *evens, odds))

    def decompress(self, payload: memoryview, block: memoryview) -> RecordStatus:
        """See `CodecSet.decode`."""
        first = _FRAME_LENGTH_BYTES + int.from_bytes(payload[:_FRAME_LENGTH_BYTES], "little")
        pairs = len(block) // 2
        decompress = self._contexts.decompressor(len(block) - pairs)
        evens = decompress(payload[_FRAME_LENGTH_BYTES:first], len(block) - pairs)
        odds = decompress(payload[first:], pairs)
        if evens is None or len(evens) != len(block) - pairs or odds is None or len(odds) != pairs:
            return RecordStatus.BAD_PAYLOAD
        _interleave(np.frombuffer(evens, np.uint8), np.frombuffer(odds, np.uint8), block)
        return RecordStatus.OK


def _every_other(block: memoryview) -> Plane:
    """Return the bytes at even offsets. To truncate 16-bit words is faster than to take every second byte."""
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


def _raw_frame(plane: Plane) -> list[bytes | memoryview]:
    """Return the parts of a frame that has a plane's bytes as they are."""
    parts: list[bytes | memoryview] = [_RAW_FRAME, len(plane).to_bytes(4, "little")]
    for begin in range(0, len(plane), _RAW_PART_BYTES):
        part = plane.data[begin : begin + _RAW_PART_BYTES]
        is_last = begin + len(part) == len(plane)
        parts += ((len(part) << 3 | is_last).to_bytes(3, "little"), part)
    return parts


def _values(plane: Plane) -> int:
    """Return how many values a sample of a plane has. The number tells data types apart: a codec is told none."""
    step = len(plane) // _SAMPLE_BYTES | 1  # odd, to sample all channels
    return len(set(plane[::step].tobytes()))
