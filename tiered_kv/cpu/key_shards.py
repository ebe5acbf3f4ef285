"""Where a key lies in the arrays of a `KeyTable`: its shard, its tag, and the slots from its home on.

The table calls it, and who saves one, on any thread. What must stay true: all of it follows from a key's hash and a
shard's size, since files have the arrays as they are in memory.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cpu.key_hashes import Hashes
from tiered_kv.system.threads import run_all

SHARDS: Final = 512
"""Of ten million keys, one has 20,000. To replace it takes some 4 ms."""
WINDOW: Final = 64
SHARD_MASK: Final = SHARDS - 1
TAGS: Final = 255  # tag 0 marks a free slot
_CHUNK: Final = 1 << 15  # how many keys `build` moves at a time, so that they fit into the processor's cache

Shard = tuple[bytearray, bytearray, int]
"""The tag of each slot, its record, and how many slots may begin a window."""


def shard_number(hashes: Hashes) -> Hashes:
    """Return in which shard keys with these hashes are."""
    numbers: Hashes = hashes & np.uint32(SHARD_MASK)
    return numbers


def tags_of(hashes: Hashes) -> NDArray[np.uint8]:
    """Return the tags of keys with these hashes."""
    return (hashes % np.uint32(TAGS) + np.uint32(1)).astype(np.uint8)


def shard_of(slot_count: int, record_bytes: int) -> Shard:
    """Return an empty shard of so many slots. Where its windows may begin follows from its size."""
    # An odd number, at most `slot_count`: all keys of a shard have some equal bits.
    slots = max(0, slot_count - max(1, min(WINDOW, slot_count // 8))) | 1
    return bytearray(slot_count), bytearray(slot_count * record_bytes), slots


def places_of(homes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a place for each record, in order of their homes: its home, or behind the record before."""
    steps = np.arange(len(homes))
    places = homes - steps
    np.maximum.accumulate(places, out=places)
    places += steps
    return places


def rows_in_order(
    keys: NDArray[np.uint8], hashes: Hashes, starts: NDArray[np.int64], slots: Hashes, threads: int
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the rows in the order of their homes, and the home of each, counted over all shards.

    Rows whose key comes again later are left out. One sort of numbers: the home in the upper bits, then some of the
    hash, then the row.
    """
    row_bits = max(1, (len(keys) - 1).bit_length())
    home_bits = int(starts[-1] + slots[-1]).bit_length()
    rest_bits = max(1, min(32, 64 - row_bits - home_bits))
    homes = np.empty(len(keys), np.uint64)

    def place(first: int) -> None:
        own = hashes[first : first + _CHUNK]
        numbers = shard_number(own)
        part = starts.take(numbers).astype(np.uint64)
        part += own % slots.take(numbers)
        part <<= np.uint64(rest_bits)
        part |= own >> np.uint32(32 - rest_bits)
        part <<= np.uint64(row_bits)
        part |= np.arange(first, first + len(own), dtype=np.uint64)
        homes[first : first + _CHUNK] = part

    for placed in run_all(place, range(0, len(keys), _CHUNK), "tiered-kv-index", threads):
        placed.result()
    homes.sort()
    order = (homes & np.uint64((1 << row_bits) - 1)).astype(np.intp)
    homes >>= np.uint64(row_bits)
    suspects = np.flatnonzero(homes[1:] == homes[:-1])
    if len(suspects):  # a hash is equal for equal keys, and for a few others
        suspects = np.union1d(suspects, suspects + 1)
        last: dict[bytes, int] = dict(zip(map(bytes, keys[order[suspects]]), suspects.tolist(), strict=True))
        kept = np.ones(len(order), bool)
        kept[suspects] = False
        kept[np.fromiter(last.values(), np.intp, len(last))] = True
        order, homes = order[kept], homes[kept]
    homes >>= np.uint64(rest_bits)
    return order, homes.astype(np.int64)
