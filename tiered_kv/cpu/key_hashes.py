"""The hashes of keys, of many at once, by which a `KeyTable` finds them.

The table calls it, and who saves or builds one, on any thread. What must stay true: a hash is XXH32 of the whole key
with seed 0, since files have it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

_CHUNK: Final = 1 << 13  # how many keys are worked on at a time, so that they fit into the processor's cache
_COLUMNS_MIN: Final = 1 << 12
"""Of so many keys, the hashes are computed column by column: faster, and mostly without the interpreter lock."""
_PRIMES: Final = tuple(map(np.uint32, (2_654_435_761, 2_246_822_519, 3_266_489_917, 668_265_263, 374_761_393)))
_STRIPE_WORDS: Final = 4

Hashes = NDArray[np.uint32]

key_hash = xxhash.xxh32_intdigest


def key_hashes(keys: NDArray[np.uint8]) -> Hashes:
    """Return `key_hash` of each row."""
    count, key_bytes = keys.shape
    if count < _COLUMNS_MIN:
        each = np.ascontiguousarray(keys).view(f"V{key_bytes}").ravel().tolist() if key_bytes else [b""] * count
        return np.fromiter(map(key_hash, each), np.uint32, count)
    hashes = np.empty(count, np.uint32)
    for first in range(0, count, _CHUNK):
        hashes[first : first + _CHUNK] = _by_columns(keys[first : first + _CHUNK])
    return hashes


def _by_columns(keys: NDArray[np.uint8]) -> Hashes:
    """The algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH32"."""
    prime1, prime2, prime3, prime4, prime5 = _PRIMES
    count, key_bytes = keys.shape
    words_end = key_bytes // 4 * 4
    words = np.ascontiguousarray(np.ascontiguousarray(keys[:, :words_end]).view("<u4").T).astype(np.uint32, copy=False)
    stripes_end = len(words) // _STRIPE_WORDS * _STRIPE_WORDS
    if stripes_end:
        starts = (int(prime1) + int(prime2), int(prime2), 0, -int(prime1))
        lanes = [np.full(count, start % (1 << 32), np.uint32) for start in starts]
        for at in range(stripes_end):
            lane = at % _STRIPE_WORDS
            lanes[lane] = _turned(lanes[lane] + words[at] * prime2, 13) * prime1
        hashes = _turned(lanes[0], 1) + _turned(lanes[1], 7) + _turned(lanes[2], 12) + _turned(lanes[3], 18)
    else:
        hashes = np.full(count, prime5, np.uint32)
    hashes += np.uint32(key_bytes)
    for word in words[stripes_end:]:
        hashes = _turned(hashes + word * prime3, 17) * prime4
    for column in range(words_end, key_bytes):
        hashes = _turned(hashes + keys[:, column] * prime5, 11) * prime1
    hashes ^= hashes >> np.uint32(15)
    hashes *= prime2
    hashes ^= hashes >> np.uint32(13)
    hashes *= prime3
    hashes ^= hashes >> np.uint32(16)
    return hashes


def _turned(values: Hashes, bits: int) -> Hashes:
    turned: Hashes = values << np.uint32(bits)
    turned |= values >> np.uint32(32 - bits)
    return turned
