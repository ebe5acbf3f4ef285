"""A table of what became of blocks: eight bytes a block and tier, in one array of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.observe.fates import Fate

Entries = np.ndarray[Any, np.dtype[np.uint64]]
Fates = np.ndarray[Any, np.dtype[np.uint8]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

CHUNK_KEYS_MAX: Final = 256
"""Keys in one call, which holds the interpreter's lock. For more than 500 numpy would release it, and wait for it."""
TICKS_PER_S: Final = 4
"""Resolution of times; 28 bits of them are two years."""
_TICKS_MAX: Final = (1 << 28) - 1
_32, _28 = np.uint64(32), np.uint64(28)
_LOW_32, _LOW_28 = np.uint64(0xFFFFFFFF), np.uint64(_TICKS_MAX)
_FATE_BITS = np.uint64(15)
_SHIFT = np.uint64(29)
_ODD, _ODD_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class FateTable:
    """Direct-mapped: each block and tier has one place, and a newer one takes it. So it forgets, and never grows.

    An entry is a fingerprint of 32 bits, the fate in 4 bits, and the time in 28 bits. Where another block has taken the
    place, its fingerprint agrees, and so the answer is wrong, with a probability of 2**-32.

    The caller serializes all calls.

    Args:
        entries: How many; 8 bytes each, which the system provides as they are used.
    """

    def __init__(self, entries: int) -> None:
        self._entries: Entries = np.zeros(entries, np.uint64)
        self._count = np.uint64(entries)

    @property
    def size_bytes(self) -> int:
        """The memory of all entries."""
        return self._entries.nbytes

    def read(self, digests: Entries, tier: int) -> tuple[Fates, Entries]:
        """Return the fates in a tier, and their ticks, of the keys with these `hashes`."""
        return self._read(*self._where(digests, tier))

    def write(
        self, digests: Entries, tier: int, fate: Fate, tick: int, *, keeps_stored_after: int | None = None
    ) -> None:
        """Write the same about each of the keys with these `hashes`.

        Where `keeps_stored_after` is given, entries that say `STORED` at a later tick stay.
        """
        places, prints = self._where(digests, tier)
        if keeps_stored_after is not None:
            fates, ticks = self._read(places, prints)
            open_ones = ~((fates == Fate.STORED) & (ticks.astype(np.int64) > keeps_stored_after))
            places, prints = places[open_ones], prints[open_ones]
        self._entries[places] = (prints << _32) | np.uint64(fate << 28 | min(tick, _TICKS_MAX))

    def _where(self, digests: Entries, tier: int) -> tuple[Entries, Entries]:
        """Return the place of each key, and its fingerprint; two multiplications mix all bits of both."""
        mixed = (digests ^ np.uint64(tier)) * _ODD
        mixed ^= mixed >> _SHIFT
        mixed *= _ODD_2
        mixed ^= mixed >> _32
        return ((mixed >> _32) * self._count) >> _32, mixed & _LOW_32

    def _read(self, places: Entries, prints: Entries) -> tuple[Fates, Entries]:
        found = self._entries[places]
        fates = ((found >> _28) & _FATE_BITS).astype(np.uint8)
        fates[(found >> _32) != prints] = Fate.UNKNOWN
        return fates, found & _LOW_28


def hashes(keys: Sequence[OffloadKey]) -> Entries:
    """Return Python's hash of each key, which a key that was in a dictionary remembers."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
