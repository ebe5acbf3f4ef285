"""The hashes of keys, of many at once, and the buckets of a `KeyTable` to which they lead.

The table calls it, and who saves or builds one, on any thread. What must stay true: a hash is `zlib.crc32` of the whole
key, since files have it.
"""

from __future__ import annotations

import functools
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

_CHUNK: Final = 1 << 16  # how many keys are worked on at a time, so that they fit into the processor's cache
_COLUMNS_MIN: Final = 1 << 10
"""Of so many keys, the hashes are computed column by column: a third of the time, and without the interpreter lock."""


def mask_of(bucket_count: int) -> int:
    """Return 2**k - 1 for the least k with at least `bucket_count` values."""
    return (1 << (bucket_count - 1).bit_length()) - 1


def bucket_indexes(hashes: NDArray[np.uint32], bucket_count: int) -> NDArray[np.uint32]:
    """Return the buckets, of so many, to which keys with these hashes belong."""
    mask = mask_of(bucket_count)
    indexes = hashes & np.uint32(mask)
    return np.where(indexes < bucket_count, indexes, indexes & np.uint32(mask >> 1))


def key_hashes(keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return `zlib.crc32` of each row. It is affine: the exclusive or of one value for each byte and a constant."""
    count, key_bytes = keys.shape
    if count < _COLUMNS_MIN:
        each = np.ascontiguousarray(keys).view(f"V{key_bytes}").ravel().tolist() if key_bytes else [b""] * count
        return np.fromiter(map(zlib.crc32, each), np.uint32, count)
    constant, tables = _crc_tables(key_bytes)
    hashes = np.full(count, constant, np.uint32)
    for first in range(0, count, _CHUNK):
        of_part = hashes[first : first + _CHUNK]
        for column, table in zip(np.ascontiguousarray(keys[first : first + _CHUNK].T), tables, strict=True):
            of_part ^= table.take(column)
    return hashes


@functools.lru_cache(maxsize=4)  # making them takes some 10,000 checksums
def _crc_tables(key_bytes: int) -> tuple[int, list[NDArray[np.uint32]]]:
    """Return the checksum of `key_bytes` zeros, and by column what each value of a byte changes in it."""
    zeros = bytes(key_bytes)
    constant = zlib.crc32(zeros)
    tables = [
        np.array(
            [zlib.crc32(zeros[:column] + bytes((value,)) + zeros[column + 1 :]) ^ constant for value in range(256)],
            np.uint32,
        )
        for column in range(key_bytes)
    ]
    return constant, tables
