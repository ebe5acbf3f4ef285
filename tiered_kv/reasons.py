"""The status of a record that was read."""

from __future__ import annotations

from enum import Enum


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


UNREADABLE = frozenset({RecordStatus.UNKNOWN_CODEC, RecordStatus.UNKNOWN_KEY})
"""Sound records that this process cannot read. Another process may be able to, so they are not deleted: see
`toolkit.record.Unreadable`."""

UNUSABLE_REASONS = frozenset(status.value for status in RecordStatus if status is not RecordStatus.OK)

DAMAGE_REASONS = UNUSABLE_REASONS - {status.value for status in UNREADABLE}
"""Reasons that count as damage."""

REFUSED = frozenset({RecordStatus.UNKNOWN_KEY, RecordStatus.BAD_TAG, RecordStatus.UNENCRYPTED})
"""Statuses that only encryption has. The counters name each; all other damage counts as `checksum`."""
