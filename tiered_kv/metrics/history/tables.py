"""Tables by a block's hash: what became of it in each tier, with eight bytes for both, and ghosts."""

from __future__ import annotations

from collections import OrderedDict
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
"""Keys in one call, which holds the interpreter's lock: for 0.1 ms. A manager that needs it meanwhile waits."""
TICKS_PER_S: Final = 4
"""Resolution of times; 28 bits of them are two years."""
_TICKS_MAX: Final = (1 << 28) - 1
_32, _28 = np.uint64(32), np.uint64(28)
_LOW_32, _LOW_28 = np.uint64(0xFFFFFFFF), np.uint64(_TICKS_MAX)
_FATE_BITS = np.uint64(15)
_TIER_FACTOR: Final = 0x9E3779B97F4A7C15
_64_BITS: Final = (1 << 64) - 1
SIZES: Final = {"0.5": 0.5, "1": 1.0, "2": 2.0, "4": 4.0}
"""Multiples of the tier's capacity. Compare the counts with the count at 1, which is an estimate too."""
SAMPLED_MAX: Final = 4096
"""Blocks that the largest ghost of a tier follows; with the smaller ones they take 1.2 MB."""
_HASHES: Final = 1 << 32
_LOW: Final = np.uint64(_HASHES - 1)


class FateTable:
    """A direct-mapped table: each block and tier has one place. A newer block takes it, so the table never grows.

    An entry is a fingerprint of 32 bits, the fate in 4 bits, and the time in 28 bits. After another block has taken the
    place, its fingerprint agrees, and so the answer is wrong, with a probability of 2**-32.

    The caller serializes all calls. The system provides the memory of `entries` as they are used.
    """

    def __init__(self, entries: int) -> None:
        self._entries: Hashes = np.zeros(entries, np.uint64)
        self._count = np.uint64(entries)

    def read(self, digests: Hashes, tier: int) -> tuple[Fates, Hashes]:
        """Return the fates in a tier, and their ticks, of the keys with these `hashes`."""
        return self._read(*self._where(digests, tier))

    def write(
        self, digests: Hashes, tier: int, fate: Fate, tick: int, *, keeps_stored_after: int | None = None
    ) -> None:
        """Write one fate of all keys with these `hashes`.

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


class Ghosts:
    """Estimates of the hits of a tier with a capacity of `blocks` at other sizes. The caller serializes all calls.

    A ghost is an LRU list of keys without bytes. It follows blocks whose hash falls into a fixed share of all hashes,
    and its size is that share of the tier's:
    C. Waldspurger, N. Park, A. Garthwaite and I. Ahmad, "Efficient MRC Construction with SHARDS" (FAST 2015). As
    SHARDS-adj does, it estimates misses and takes all else for hits. A few blocks have many of the hits, and the sample
    may have too many or too few of these blocks; misses come from many blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._share = min(1.0, SAMPLED_MAX / (max(SIZES.values()) * blocks))
        self._below = np.uint64(min(int(self._share * _HASHES), _HASHES - 1))
        self._limits = [max(1, round(times * blocks * self._share)) for times in SIZES.values()]
        self._followed: list[OrderedDict[int, None]] = [OrderedDict() for _ in SIZES]
        self._uses = 0
        self._misses = [0] * len(SIZES)  # of the sample
        self._reported = [0] * len(SIZES)

    def use(self, digests: Hashes) -> None:
        """Note that requests use blocks: they load them, or store them after a miss."""
        self._uses += len(digests)
        sample = digests[(digests & _LOW) <= self._below].tolist()
        for size, followed in enumerate(self._followed):
            limit = self._limits[size]
            for digest in sample:
                if digest in followed:
                    followed.move_to_end(digest)
                else:
                    self._misses[size] += 1
                    followed[digest] = None
                    if len(followed) > limit:
                        followed.popitem(last=False)

    def reset(self) -> None:
        for followed in self._followed:
            followed.clear()

    def snapshot(self) -> dict[str, int]:
        """Return the hits of each size so far; no number becomes less."""
        hits = (self._uses - int(misses / self._share) for misses in self._misses)
        self._reported = list(map(max, self._reported, hits))
        return dict(zip(SIZES, self._reported, strict=True))


def hashes(keys: Sequence[OffloadKey]) -> Hashes:
    """Return Python's hash (SipHash) of each key, which a key that was in a dictionary remembers."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
