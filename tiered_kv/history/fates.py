"""Fates: what became of a block in a tier, and a table of them with eight bytes for each block and tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import DAMAGE_REASONS

Hashes = NDArray[np.uint64]
Fates = NDArray[np.uint8]
Mask = NDArray[np.bool_]

CHUNK_KEYS_MAX: Final = 256
"""Keys in one call, which holds the interpreter's lock. For more than 500 numpy would release it, and wait for it."""
TICKS_PER_S: Final = 4
"""Resolution of times; 28 bits of them are two years."""
_TICKS_MAX: Final = (1 << 28) - 1
_32, _28 = np.uint64(32), np.uint64(28)
_LOW_32, _LOW_28 = np.uint64(0xFFFFFFFF), np.uint64(_TICKS_MAX)
_FATE_BITS = np.uint64(15)
_TIER_FACTOR: Final = 0x9E3779B97F4A7C15
_64_BITS: Final = (1 << 64) - 1


class Fate(IntEnum):
    """What became of a block in a tier; `SENTENCES` explains each. All but the first two are reasons for a miss.

    The table has 4 bits for a fate. Fates from 16 on are noted for single requests only.
    """

    UNKNOWN = 0
    STORED = 1
    ABSENT = 2
    EVICTED = 3
    EXPIRED = 4
    RESET = 5
    ADMISSION = 6
    BUDGET = 7
    NO_SPACE = 8
    BREAKER = 9
    DISABLED = 10
    REFUSED = 11
    CORRUPT = 12
    TIMEOUT = 13
    TOO_LATE = 14
    FAILED = 15
    TOO_SLOW = 16
    BY_REQUEST = 17

    @property
    def label(self) -> str:
        """Its name in the counters."""
        return self.name.lower()


PRESENT: Final = "present"
"""In an explanation: the primary tier has the block now. The other words are the labels of fates."""
SENTENCES: Final[Mapping[str, str]] = {
    PRESENT: "is there now",
    "stored": "was stored",
    "unknown": "never seen there, or forgotten by the history",
    "absent": "never seen there, or forgotten by the history",
    "evicted": "evicted, or found to be gone",
    "expired": "found to be gone; it was stored longer ago than the tier's ttl",
    "reset": "gone with a reset of the cache; or the request began before one",
    "admission": "not stored: not admitted (admit_after, write_budget)",
    "budget": "not stored, or not looked up: the tier's budget was used up",
    "no_space": "not stored: the tier had no room",
    "breaker": "not stored, or not looked up: the tier's breaker was open",
    "disabled": "not stored, or not looked up: the tier is not used any more",
    "refused": "was there, and there was no room to promote it",
    "corrupt": "was damaged, and is deleted",
    "timeout": "the tier did not answer, or end the transfer, in time",
    "too_slow": "the engine computes it sooner than it would have come",
    "by_request": "the request wanted no blocks (its hint 'skip')",
    "too_late": "the request had waited for request_wait",
    "failed": "the tier could not store it, or bring it",
}
"""The meaning of each fate, human-readable."""

_BY_REASON: Final = {
    "absent": Fate.EVICTED,
    "missing": Fate.EVICTED,
    "reset": Fate.RESET,
    "no_space": Fate.NO_SPACE,
    "expired": Fate.TIMEOUT,  # the job's deadline
    "timeout": Fate.TIMEOUT,
    "unanswered": Fate.TIMEOUT,
    "breaker": Fate.BREAKER,
    "disabled": Fate.DISABLED,
    "budget": Fate.BUDGET,
    "admission": Fate.ADMISSION,
    "write_budget": Fate.ADMISSION,
    "too_slow": Fate.TOO_SLOW,
    **dict.fromkeys(DAMAGE_REASONS, Fate.CORRUPT),
}


def fate_of(reason: str) -> Fate:
    """Return the fate of blocks whose job failed, or whose store was skipped, for this reason."""
    return _BY_REASON.get(reason, Fate.FAILED)


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


def hashes(keys: Sequence[OffloadKey]) -> Hashes:
    """Return Python's hash (SipHash) of each key, which a key that was in a dictionary remembers."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
