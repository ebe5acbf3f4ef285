"""The results of requests for objects: success, or the reason of a failure and whether another attempt may help.

The stores and controls of object tiers make them, on their threads. A reason is a `Verdict` from where it arises to
where it is counted.
"""

from __future__ import annotations

from enum import StrEnum

from tiered_kv.errors import TierUnavailableError


class Verdict(StrEnum):
    """The result of a request; the value is its reason's name in the counters."""

    DONE = "done"
    ABSENT = "absent"
    EXPIRED = "absent_by_age"  # the object is older than `ttl`
    PRESENT = "present"  # an object of this name exists, and the request was not to replace it
    OVERSIZED = "oversized"  # the object is longer, or shorter, than a record can be
    CREDENTIALS_EXPIRED = "credentials_expired"  # the credentials have expired, and there are no others
    NO_BUCKET = "no_bucket"
    DENIED = "denied"
    NO_SPACE = "no_space"  # the server's storage, or a quota, is full; it still serves loads
    UNASKED = "unasked"  # the request was not sent: its time was over
    UNANSWERED = "unanswered"  # the bucket does not answer for this block, while it answers for others
    UNREADABLE = "unreadable"
    """The object cannot be read by this process, and stays; see `tiered_kv.toolkit.record.Unreadable`."""
    REFUSED = "refused"  # the server refuses the request as invalid
    UNTRUSTED = "untrusted"  # the server's certificate is not signed by a trusted authority
    MOVED = "moved"  # the bucket is in another region than the setting `region`

    # Another attempt may help.
    SLOW_DOWN = "slow_down"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    BROKEN = "broken"  # the connection was reset, or the answer was cut off or not HTTP
    CREDENTIALS = "credentials"  # the credentials had expired, and there are new ones
    REDIRECTED = "redirected"  # the request was for another region than the bucket's, which is known now


_OF_SERVER = {Verdict.SLOW_DOWN, Verdict.UNAVAILABLE, Verdict.TIMEOUT, Verdict.BROKEN}
_OF_SETTINGS = {Verdict.CREDENTIALS_EXPIRED, Verdict.NO_BUCKET, Verdict.DENIED, Verdict.REFUSED, Verdict.MOVED}
RETRYABLE = frozenset({*_OF_SERVER, Verdict.CREDENTIALS, Verdict.REDIRECTED})
FAILURES = RETRYABLE | _OF_SETTINGS | {Verdict.UNTRUSTED, Verdict.NO_SPACE}
ABSENCE = frozenset({Verdict.ABSENT, Verdict.EXPIRED})
UNHEARD = frozenset({Verdict.UNAVAILABLE, Verdict.TIMEOUT, Verdict.BROKEN, Verdict.UNASKED})
"""The server has not answered the request."""


class BucketError(TierUnavailableError):
    """A request failed; the message says what is wrong with the bucket, and the remedy.

    `reason` is a verdict, an error code of the server, or the class of an exception. `status` is 0 without an answer.
    """

    def __init__(self, message: str, reason: str, *, tier: str, operation: str, status: int = 0) -> None:
        super().__init__(message, tier=tier, operation=operation)
        self.reason = reason
        self.status = status
