"""The fates of blocks: a table by a block's hash, with eight bytes for the fate in one tier and its time.

`ledger.Ledger` makes it, and calls it under its lock, on the history's thread or on a reader's. The table never grows.
A wrong fate has a probability of 2**-32, and changes an explanation only, never a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Fate

Hashes = NDArray[np.uint64]
Fates = NDArray[np.uint8]
Mask = NDArray[np.bool_]

CHUNK_KEYS_MAX: Final = 128
"""Keys in one call. It holds the interpreter's lock for 0.1 ms; the scheduler's thread may wait as long."""
TICKS_PER_S: Final = 4
"""Resolution of times; 28 bits of ticks are two years."""
_TICKS_MAX: Final = (1 << 28) - 1
_32, _28 = np.uint64(32), np.uint64(28)
_LOW_32, _LOW_28 = np.uint64(0xFFFFFFFF), np.uint64(_TICKS_MAX)
_FATE_BITS = np.uint64(15)
_TIER_FACTOR: Final = 0x9E3779B97F4A7C15
_64_BITS: Final = (1 << 64) - 1


class FateTable:
    """A direct-mapped table: each block and tier has one place. A newer block takes it, so the table never grows.

    An entry is a fingerprint of 32 bits, the fate in 4 bits, and the time in 28 bits. If another block has taken the
    place, its fingerprint agrees with a probability of 2**-32; then the answer is wrong.

    The caller serializes all calls. The system provides the memory of an entry when it is first written.
    """

    def __init__(self, entries: int) -> None:
        self._entries: Hashes = np.zeros(entries, np.uint64)
        self._count = np.uint64(entries)

    def read(self, digests: Hashes, tier: int) -> tuple[Fates, Hashes]:
        """Return the fates in a tier, and their ticks, of the keys with these digests (`hashes`)."""
        return self._read(*self._where(digests, tier))

    def write(
        self, digests: Hashes, tier: int, fate: Fate, tick: int, *, keeps_stored_after: int | None = None
    ) -> None:
        """Write one fate of all keys with these digests (`hashes`).

        Entries that say `STORED` at a later tick than `keeps_stored_after`, if given, stay as they are.
        """
        places, prints = self._where(digests, tier)
        if keeps_stored_after is not None:
            fates, ticks = self._read(places, prints)
            replaced = ~((fates == Fate.STORED) & (ticks.astype(np.int64) > keeps_stored_after))
            places, prints = places[replaced], prints[replaced]
        self._entries[places] = (prints << _32) | np.uint64(fate << 28 | min(tick, _TICKS_MAX))

    def _where(self, digests: Hashes, tier: int) -> tuple[Hashes, Hashes]:
        """Return the place and the fingerprint of each key: the two halves of its hash, which differ between tiers."""
        of_tier = digests ^ np.uint64(tier * _TIER_FACTOR & _64_BITS)
        return ((of_tier >> _32) * self._count) >> _32, of_tier & _LOW_32

    def _read(self, places: Hashes, prints: Hashes) -> tuple[Fates, Hashes]:
        found = self._entries[places]
        fates = ((found >> _28) & _FATE_BITS).astype(np.uint8)
        fates[(found >> _32) != prints] = Fate.UNKNOWN
        return fates, found & _LOW_28


def hashes(keys: Sequence[OffloadKey]) -> Hashes:
    """Return Python's hash (SipHash) of each key. A key that was in a dictionary has its hash stored."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)


def of_largest_group(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return the rows of the KV cache group that has the most of them; they have a field `group`."""
    groups = rows["group"]
    if not len(groups) or (groups == groups[0]).all():  # most often
        return rows
    found, counts = np.unique(groups, return_counts=True)
    largest: NDArray[np.void] = rows[groups == found[counts.argmax()]]
    return largest
