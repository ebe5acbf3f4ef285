"""The result of reading a record."""

from __future__ import annotations

from enum import Enum


class RecordStatus(Enum):
    """Whether a record is the one that was asked for; the value is the reason's name in the counters."""

    OK = "ok"
    TRUNCATED = "truncated"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_HEADER = "bad_header"
    """A reserved field is not zero, a flag is not known to this version, or the key id is not the payload's."""
    UNKNOWN_CODEC = "unknown_codec"
    """The record is sound, but this process lacks the codec or its library."""
    BAD_LENGTH = "bad_length"
    WRONG_NAMESPACE = "wrong_namespace"
    WRONG_KEY = "wrong_key"
    BAD_CHECKSUM = "checksum"
    BAD_PAYLOAD = "bad_payload"
    """The checksum is right, but the codec cannot read the payload: a fault of the writer."""
    UNKNOWN_KEY = "unknown_key"
    """The record is sound, but encrypted with a key that this process lacks. Others may have it."""
    BAD_TAG = "bad_tag"
    """The checksum and the key are right, but the tag is not: an attacker changed or moved the record."""
    UNENCRYPTED = "unencrypted"
    """The record is sound but plain, where only encrypted ones are accepted."""


UNREADABLE = frozenset({RecordStatus.UNKNOWN_CODEC, RecordStatus.UNKNOWN_KEY})
"""Sound records that cannot be read here. Another installation that shares the storage may be able to, so they stay
there: see `unreadable.py`."""

UNUSABLE_REASONS = frozenset(status.value for status in RecordStatus if status is not RecordStatus.OK)
"""Reasons for which a record that was read is not loaded."""

DAMAGE_REASONS = UNUSABLE_REASONS - {status.value for status in UNREADABLE}
"""Those of them that count as damage."""

REFUSED = frozenset({RecordStatus.UNKNOWN_KEY, RecordStatus.BAD_TAG, RecordStatus.UNENCRYPTED})
"""Records that encryption refuses. Each has a reason of its own; other damage counts as a wrong checksum."""
