"""What may have become of a block in a tier, and the names of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.status import DAMAGE_REASONS


class Fate(IntEnum):
    """What became of a block in a tier. All but the first two are reasons for a miss.

    An entry of the history has 4 bits for it. What only the request's own troubles tell may be larger.
    """

    UNKNOWN = 0
    """The history has no entry of the block."""
    STORED = 1
    ABSENT = 2
    """The tier has never had it, as far as the history goes."""
    EVICTED = 3
    """It was there, and is gone."""
    EXPIRED = 4
    """It was stored longer ago than the tier's `ttl`."""
    RESET = 5
    """It was there before the cache was reset."""
    ADMISSION = 6
    """It was not stored: it had not been offered often enough, or the write budget went to others."""
    BUDGET = 7
    """It was not stored, or not looked up: the tier's budget was used up."""
    NO_SPACE = 8
    """It was not stored: the tier had no room."""
    BREAKER = 9
    """It was not stored, or not looked up: the breaker was open."""
    DISABLED = 10
    """It was not stored, or not looked up: the tier is not used any more."""
    REFUSED = 11
    """The tier had it, and there was no room to promote it."""
    CORRUPT = 12
    """The load found it damaged."""
    TIMEOUT = 13
    """A lookup, a load or a store did not end in time."""
    TOO_LATE = 14
    """The request had waited for `request_wait`."""
    FAILED = 15
    """The store or the load failed for another reason."""
    TOO_SLOW = 16
    """The tier had it, and the engine computes it sooner than it would have come."""
    BY_REQUEST = 17
    """The request wanted no blocks."""

    @property
    def label(self) -> str:
        """Its name in the counters."""
        return self.name.lower()


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
    """Return what the reason of a job's failure, or of a skipped store, means for its blocks."""
    return _BY_REASON.get(reason, Fate.FAILED)


PRESENT: Final = "present"
"""What is said of a block that is in the primary tier now; the other words are the fates' labels."""
SENTENCES: Final[Mapping[str, str]] = {
    PRESENT: "is there now",
    "stored": "was stored",
    "unknown": "never seen there, or forgotten by the history",
    "absent": "never seen there, or forgotten by the history",
    "evicted": "evicted, or found to be gone",
    "expired": "found to be gone; it was stored longer ago than the tier's ttl",
    "reset": "gone with a reset of the cache",
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
"""What a fate means, for people."""

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
