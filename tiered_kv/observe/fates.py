"""What may have become of a block in a tier, and the names of it."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

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
