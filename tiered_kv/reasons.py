"""Why a block was not stored, not found or not loaded: the words in counters and explanations, as enums.

Tiers, the manager, its history and the exporters use it, on any thread. What must stay true: a reason is a `Reason`
from where it arises to where it is shown. Only a third-party tier's word is text, until `Reason.of` converts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, StrEnum
from typing import Final, Self


class RecordStatus(Enum):
    """OK, or why a record is not loaded. The value is the reason in the counters."""

    OK = "ok"
    TRUNCATED = "truncated"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_HEADER = "bad_header"
    """A reserved field or a flag is not zero, or the key id differs from the payload's."""
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
    """The storage cannot read the record, but reads others."""

    @property
    def reason(self) -> Reason:
        """The reason of a failed load: `CHECKSUM`, except for unreadable records, encryption and a bad place."""
        return self.cause if self in REFUSED | UNREADABLE | {RecordStatus.BAD_PLACE} else Reason.CHECKSUM

    @property
    def cause(self) -> Reason:
        """The reason that has the same word; not of `OK`."""
        return Reason.of(str(self.value))


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
        """The name of the reason in the counters."""
        return self.name.lower()


PRESENT: Final = "present"
"""A word of an explanation: the primary tier has the block now. All other words are labels of fates."""
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
    "disabled": "not stored, or not looked up: the tier is not used any more, or was taken out",
    "refused": "was there, and there was no room to promote it",
    "corrupt": "was damaged, and is deleted",
    "timeout": "the tier did not answer, or end the transfer, in time",
    "too_slow": "the engine computes it sooner than it would have come",
    "by_request": "the request wanted no blocks (its hint 'skip')",
    "too_late": "the request had waited for request_wait",
    "failed": "the tier could not store it, or bring it",
}
"""The meaning of each fate, human-readable."""


_GONE: Final = (Fate.EVICTED, True, False, True)
_DAMAGED: Final = (Fate.CORRUPT, True, True, True)
_DAMAGED_RECORD: Final = ("the block's record is damaged, or another block's", *_DAMAGED)
_UNREADABLE: Final = ("this process lacks the block's codec or key", Fate.FAILED, True, False, True)
_HARMLESS: Final = (False, False, True)


class Reason(StrEnum):
    """Why a block was not stored, found or loaded; the value is the word in the counters.

    A tier from elsewhere may have words of its own: `Reason.of` makes them members, and the counters keep the words.
    """

    sentence: str
    fate: Fate  # the history's word for it
    is_gone: bool  # the tier has no usable copy of the block after a load that failed
    is_damage: bool
    is_harmless: bool  # a healthy tier may fail a whole job for it

    def __new__(
        cls,
        word: str,
        sentence: str,
        fate: Fate = Fate.FAILED,
        is_gone: bool = False,
        is_damage: bool = False,
        is_harmless: bool = False,
    ) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.sentence, member.fate = sentence, fate
        member.is_gone, member.is_damage, member.is_harmless = is_gone, is_damage, is_harmless
        return member

    # The block was not given to a tier.
    BUDGET = "budget", "the tier's store budget was used up", Fate.BUDGET
    ADMISSION = "admission", "it had not been offered often enough (admit_after)", Fate.ADMISSION
    WRITE_BUDGET = (
        "write_budget",
        "the tier's write_budget went to blocks that are more likely to return",
        Fate.ADMISSION,
    )
    BREAKER = "breaker", "the tier's breaker was open", Fate.BREAKER
    DISABLED = "disabled", "the tier is not used any more", Fate.DISABLED
    DRAINED = "drained", "an operator had taken the tier out", Fate.DISABLED
    BY_REQUEST = "by_request", "the request wanted it (its hint 'skip')"

    # One request does not get a block that the tier has.
    REFUSED = "refused", "there was no room to promote it", Fate.REFUSED
    TOO_SLOW = "too_slow", "the engine computes it sooner than it would have come", Fate.TOO_SLOW

    # A job did not store or load the block.
    ABSENT = "absent", "the tier did not have the block, or had evicted it", *_GONE
    MISSING = "missing", "the tier did not have the block's file", *_GONE
    NO_SPACE = "no_space", "there was no room in the tier", Fate.NO_SPACE, *_HARMLESS
    ALLOCATING = "allocating", "the tier was still allocating the file for it", Fate.NO_SPACE, *_HARMLESS
    NO_ROW = "no_row", "the engine named blocks outside of its memory", Fate.FAILED, *_HARMLESS
    RESET = "reset", "the cache was reset meanwhile", Fate.RESET, *_HARMLESS
    EXPIRED = "expired", "the deadline passed", Fate.TIMEOUT
    TIMEOUT = "timeout", "a call to the storage took too long", Fate.TIMEOUT
    UNANSWERED = "unanswered", "a server did not answer for these blocks", Fate.TIMEOUT, *_HARMLESS
    IO_ERROR = "io_error", "a system call failed"
    UNAVAILABLE = "unavailable", "the storage of the tier did not answer"
    BUSY = "busy", "another user holds what the tier needs"
    FORMAT = "format", "the data is of another version or namespace"
    KEY_SIZE = "key_size", "the key is too long for the tier"
    SHUTDOWN = "shutdown", "the tier was shut down"
    EXCEPTION = "exception", "a method of the tier raised an exception"
    ERROR = "error", "the tier's code raised an exception"
    BAD_OUTCOME = "bad_outcome", "the tier's code returned no outcome"
    NONSENSE = "nonsense", "the tier reported no result"
    FAILED = "failed", "the tier named no reason"
    OTHER = "other", "the tier names the reason"
    """A word of a tier's own."""
    TRUNCATED = "truncated", "bytes of the block were missing", *_DAMAGED
    CHECKSUM = "checksum", "the block's bytes did not match their checksum", *_DAMAGED
    BAD_PLACE = "bad_place", "the disk could not read the place of the block", *_DAMAGED
    BAD_MAGIC = "bad_magic", *_DAMAGED_RECORD
    BAD_VERSION = "bad_version", *_DAMAGED_RECORD
    BAD_HEADER = "bad_header", *_DAMAGED_RECORD
    BAD_LENGTH = "bad_length", *_DAMAGED_RECORD
    WRONG_NAMESPACE = "wrong_namespace", *_DAMAGED_RECORD
    WRONG_KEY = "wrong_key", *_DAMAGED_RECORD
    BAD_PAYLOAD = "bad_payload", *_DAMAGED_RECORD
    BAD_TAG = "bad_tag", *_DAMAGED_RECORD
    UNENCRYPTED = "unencrypted", *_DAMAGED_RECORD
    UNKNOWN_CODEC = "unknown_codec", *_UNREADABLE
    UNKNOWN_KEY = "unknown_key", *_UNREADABLE

    @classmethod
    def of(cls, word: str) -> Reason:
        """Return the reason that a tier calls `word`: `OTHER` for a word of its own, `FAILED` if it gives none."""
        if isinstance(word, cls):
            return word
        return _OF_TIERS.get(word, cls.OTHER) if word else cls.FAILED

    def is_ignored(self, *, is_store: bool) -> bool:
        """Return whether the breaker ignores it. If a store finds a block gone, the place for blocks is gone."""
        return self.is_harmless and not (is_store and self.is_gone)


SKIPPED: Final = (
    Reason.BUDGET,
    Reason.ADMISSION,
    Reason.WRITE_BUDGET,
    Reason.BREAKER,
    Reason.DISABLED,
    Reason.DRAINED,
    Reason.BY_REQUEST,
)
"""Why a block was not given to a tier."""
FAILED: Final = tuple(
    reason for reason in Reason if reason not in SKIPPED and reason not in (Reason.REFUSED, Reason.TOO_SLOW)
)
"""Why a job did not store or load a block. A tier may have further words."""
_OF_TIERS: Final[Mapping[str, Reason]] = {
    reason.value: reason for reason in Reason if reason not in (Reason.REFUSED, Reason.TOO_SLOW)
}
"""The words that a tier may use. `REFUSED` and `TOO_SLOW` concern one request, and not a job."""


class TooSlow(StrEnum):
    """Why exactly a block was `Reason.TOO_SLOW`; the value is the word in the counters."""

    sentence: str

    def __new__(cls, word: str, sentence: str) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.sentence = sentence
        return member

    LATE = "late", "the load would have ended after the engine had computed the block"
    CUT = "cut", "the blocks before it were loaded, and it would have come too late"
    LEARNING = "learning", "the tier's times were not known, so only few blocks were loaded"
    TRY = "try", "it was loaded to measure the tier again, and its request did not wait"
    NOT_ASKED = "not_asked", "the tier was not asked, or had not answered"


class Learning(StrEnum):
    """Why a load measures a tier's times; the value is the word in the counters."""

    FIRST = "first"
    TRY = "try"
