"""Why a block was not stored, not found or not loaded: one table of the words in counters and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from typing import Final


class RecordStatus(Enum):
    """OK, or why a record is not loaded. The value is the reason in the counters."""

    OK = "ok"
    TRUNCATED = "truncated"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_HEADER = "bad_header"
    """A reserved field or a flag is not zero, or the key id is not that of the payload."""
    UNKNOWN_CODEC = "unknown_codec"
    """The record is sound, but this process lacks the codec or its library."""
    BAD_LENGTH = "bad_length"
    WRONG_NAMESPACE = "wrong_namespace"
    WRONG_KEY = "wrong_key"
    BAD_CHECKSUM = "checksum"
    BAD_PAYLOAD = "bad_payload"
    """The checksum is right, but the codec cannot read the payload: a fault of the writer."""
    UNKNOWN_KEY = "unknown_key"
    """The record is sound, but encrypted with a key that this process lacks."""
    BAD_TAG = "bad_tag"
    """The checksum and the key are right, but not the tag: an attacker changed or moved the record."""
    UNENCRYPTED = "unencrypted"
    """The record is sound and plain, but only encrypted records are accepted."""

    BAD_PLACE = "bad_place"
    """The storage cannot read the record, and reads others."""

    @property
    def reason(self) -> str:
        """The reason of a failed load: what only encryption has, and a bad place, by its word; the rest `checksum`."""
        return str(self.value) if self in REFUSED | UNREADABLE | {RecordStatus.BAD_PLACE} else "checksum"


UNREADABLE = frozenset({RecordStatus.UNKNOWN_CODEC, RecordStatus.UNKNOWN_KEY})
"""Sound records that this process cannot read. Another process may be able to, so they are not deleted: see
`toolkit.record.Unreadable`."""

REFUSED = frozenset({RecordStatus.UNKNOWN_KEY, RecordStatus.BAD_TAG, RecordStatus.UNENCRYPTED})
"""Statuses that only encryption has."""


class Fate(IntEnum):
    """The fate of a block in a tier; `SENTENCES` explains each. All but the first two are miss reasons.

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


@dataclass(frozen=True, slots=True)
class Reason:
    """The meaning of a counters' reason for the blocks of a store or a load."""

    sentence: str
    fate: Fate = Fate.FAILED  # the history's word for it
    is_gone: bool = False  # the tier has no usable copy of the block after a load that failed
    is_damage: bool = False
    is_harmless: bool = False  # a healthy tier may fail a whole job for it

    def is_ignored(self, *, is_store: bool) -> bool:
        """Return whether the breaker ignores it. A store needs no block: then the place for blocks is gone."""
        return self.is_harmless and not (is_store and self.is_gone)


_gone = partial(Reason, fate=Fate.EVICTED, is_gone=True, is_harmless=True)
_damaged = partial(Reason, fate=Fate.CORRUPT, is_gone=True, is_damage=True, is_harmless=True)
_unreadable = partial(Reason, is_gone=True, is_harmless=True)

SKIPPED: Final[Mapping[str, Reason]] = {
    "budget": Reason("the tier's store budget was used up", Fate.BUDGET),
    "admission": Reason("it had not been offered often enough (admit_after)", Fate.ADMISSION),
    "write_budget": Reason("the tier's write_budget went to blocks that are more likely to return", Fate.ADMISSION),
    "breaker": Reason("the tier's breaker was open", Fate.BREAKER),
    "disabled": Reason("the tier is not used any more", Fate.DISABLED),
    "by_request": Reason("the request wanted it (its hint 'skip')"),
}
"""Why a block was not given to a tier."""
TOO_SLOW: Final = "too_slow"
"""The reason for blocks that are not promoted because the engine computes them sooner."""
TOO_SLOW_REASONS: Final[Mapping[str, str]] = {
    "late": "the load would have ended after the engine had computed the block",
    "cut": "the blocks before it were loaded, and it would have come too late",
    "learning": "the tier's times were not known, so only few blocks were loaded",
    "try": "it was loaded to measure the tier again, and its request did not wait",
    "not_asked": "the tier was not asked, or had not answered",
}
"""Why exactly a block was too slow, with sentences."""
FAILED: Final[Mapping[str, Reason]] = {
    "absent": _gone("the tier did not have the block, or had evicted it since the lookup"),
    "missing": _gone("the tier did not have the block's file"),
    "no_space": Reason("there was no room in the tier", Fate.NO_SPACE, is_harmless=True),
    "allocating": Reason("the tier was still allocating the file for it", Fate.NO_SPACE, is_harmless=True),
    "no_row": Reason("the engine named blocks outside of its memory", is_harmless=True),
    "reset": Reason("the cache was reset meanwhile", Fate.RESET, is_harmless=True),
    "expired": Reason("the deadline passed", Fate.TIMEOUT),
    "timeout": Reason("a call to the storage took too long", Fate.TIMEOUT),
    "unanswered": Reason("a server of the tier did not answer for these blocks", Fate.TIMEOUT, is_harmless=True),
    "io_error": Reason("a system call failed"),
    "unavailable": Reason("the storage of the tier did not answer"),
    "busy": Reason("another user holds a resource that the tier needs"),
    "format": Reason("the data is of another version or namespace"),
    "key_size": Reason("the key is too long for the tier"),
    "shutdown": Reason("the tier was shut down"),
    "exception": Reason("a method of the tier raised an exception"),
    "truncated": _damaged("bytes of the block were missing"),
    "checksum": _damaged("the block's bytes did not match their checksum"),
    "bad_place": _damaged("the disk could not read the place of the block"),
    **{
        status.value: _damaged("the block's record is damaged, or another block's")
        for status in RecordStatus
        if status.value not in ("ok", "truncated", "checksum", "bad_place")
    },
    **{status.value: _unreadable("this process lacks the block's codec or key") for status in UNREADABLE},
}
"""Why a job did not store or load a block. A tier may have further reasons."""
_OTHER: Final = Reason("the tier could not store it, or bring it")


def reason_of(word: str) -> Reason:
    """Return the meaning of the reason of a skipped store, or of a failed job. The history's table has room for its
    fate."""
    return SKIPPED.get(word) or FAILED.get(word) or _OTHER
