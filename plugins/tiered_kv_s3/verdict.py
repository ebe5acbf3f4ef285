"""What an answer of S3 means: its verdict, its words, and the sentence that names the bucket, the fault and the remedy.

`Bucket`, `Control` and the access call it, on their threads.
"""

from __future__ import annotations

import email.utils
import html
import re
import ssl
from datetime import UTC, datetime

from tiered_kv.toolkit.objects.verdict import Verdict
from tiered_kv_s3.connection import Answer, BadAnswerError

_CODE = re.compile(rb"<(?:\w+:)?Code>\s*([A-Za-z0-9.]{1,100})\s*</")
_MESSAGE = re.compile(rb"<(?:\w+:)?Message>([^<]{1,1000})</")
_REGION = re.compile(rb"<(?:\w+:)?Region>([a-z0-9-]{1,64})</")
_REGION_NAME = re.compile(r"[a-z0-9-]{1,64}")

_CREDENTIAL_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_SLOW_DOWN_CODES = frozenset({"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException"})
_FULL_CODES = frozenset({"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage"})
"""Error codes of servers with a full storage or quota: MinIO, Ceph."""
_UNAVAILABLE_CODES = frozenset(
    {"RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict"}
)


_CREDENTIALS = ("refuses the credentials", "correct 'access_key_id' and 'secret_access_key', or the profile's")
_RIGHTS = "give the credentials s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"
_MISSING_RIGHT = ("refuses the request", _RIGHTS)
_NO_SUCH_BUCKET = ("does not exist", "make it, or correct 'bucket'")
_OTHER_REGION = ("is in another region", "correct 'region'")
_IS_SAID: dict[str, tuple[str, str]] = {
    Verdict.UNAVAILABLE: ("does not serve requests", "start the server, or correct 'endpoint_url'"),
    Verdict.TIMEOUT: (
        "does not answer in time",
        "see whether the server is overloaded or a firewall drops packets, or raise 'request_timeout'",
    ),
    Verdict.BROKEN: ("ends connections, or does not answer as S3 does", "correct 'endpoint_url'"),
    Verdict.SLOW_DOWN: ("asks for fewer requests", "lower 'connections', or wait"),
    Verdict.NO_SPACE: ("has no room left", "give the server more storage, raise the quota, or lower 'capacity'"),
    Verdict.UNTRUSTED: (
        "has a certificate that is refused",
        "set 'ca_file' to the file of its authority, or use a name that the certificate has",
    ),
    Verdict.CREDENTIALS_EXPIRED: ("refuses credentials that have expired", "renew them"),
    Verdict.NO_BUCKET: _NO_SUCH_BUCKET,
    "NoSuchBucket": _NO_SUCH_BUCKET,
    Verdict.DENIED: _MISSING_RIGHT,
    "AccessDenied": _MISSING_RIGHT,
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "RequestTimeTooSkewed": ("says that clocks differ", "set the clock of this machine"),
    Verdict.MOVED: _OTHER_REGION,
    "PermanentRedirect": _OTHER_REGION,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    Verdict.REFUSED: ("refuses the request as invalid", "see whether the server knows S3's requests"),
}
_UNKNOWN_HOST = ("not known", "name resolution", "no address")
"""Words in the resolver's text about a host without an address."""


def sentence(url: str, reason: str, words: str, operation: str = "") -> str:
    """Return the fault of the bucket at `url`, and the remedy. `operation` is the request's, such as "put".

    `words` are the text of the server or the system, without secrets. If they begin with a known error code, it counts
    before `reason`.
    """
    code = words.partition(":")[0]
    problem, remedy = _IS_SAID.get(code) or _IS_SAID.get(reason) or ("fails", "")
    if any(each in words for each in _UNKNOWN_HOST):
        remedy = "correct the host in 'endpoint_url', or this machine's DNS"
    if "WRONG_VERSION_NUMBER" in words:  # OpenSSL's word for an answer that is no TLS
        problem, remedy = "does not speak TLS", "write 'http://' in place of 'https://' in 'endpoint_url'"
    detail = words if reason in set(Verdict) else ": ".join(filter(None, (reason, words)))
    problem += f" to {operation}" if operation and problem == "refuses the request" else ""
    return f"the bucket {url} {problem}" + (f" ({detail})" if detail else "") + (f"; {remedy}" if remedy else "")


def verdict_of(answer: Answer, body: bytes) -> Verdict:
    """Return the verdict on an answer that reports a failure; `body` is empty if none was read."""
    match = _CODE.search(body)
    code, status = match[1].decode() if match else "", answer.status
    if code in _CREDENTIAL_CODES:
        return Verdict.CREDENTIALS
    if status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed":
        return Verdict.MOVED
    if status == 507 or code in _FULL_CODES:
        return Verdict.NO_SPACE
    if status in (429, 503) or code in _SLOW_DOWN_CODES:
        return Verdict.SLOW_DOWN
    if status == 412:
        return Verdict.PRESENT
    if status == 501:  # the server does not implement it: another attempt would not help
        return Verdict.REFUSED
    if status >= 500 or status == 408 or code in _UNAVAILABLE_CODES:
        return Verdict.UNAVAILABLE
    if status == 404:
        return Verdict.NO_BUCKET if code == "NoSuchBucket" else Verdict.ABSENT
    return Verdict.DENIED if status in (401, 403) else Verdict.REFUSED


def words_in(answer: Answer, body: bytes) -> str:
    """Return a server's words about a failure: its error code and message, or only the status."""
    code, message = _CODE.search(body), _MESSAGE.search(body)
    said = [found[1].decode("utf-8", "replace") for found in (code, message) if found]
    return html.unescape(": ".join(said)) or f"HTTP status {answer.status}"


def region_in(answer: Answer, body: bytes) -> str:
    """Return the region that an answer names; empty if it names none."""
    found = _REGION.search(body)
    region = answer.headers.get("x-amz-bucket-region") or (found[1].decode() if found else "")
    return region if _REGION_NAME.fullmatch(region) else ""


def verdict_of_error(error: OSError) -> Verdict:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Verdict.UNTRUSTED
    if isinstance(error, TimeoutError):
        return Verdict.TIMEOUT
    if isinstance(error, BadAnswerError | ConnectionResetError | BrokenPipeError | ssl.SSLError):
        return Verdict.BROKEN
    return Verdict.UNAVAILABLE


def seconds_of(date: str) -> float | None:
    """Return a date of HTTP or ISO 8601, in UTC if it has no zone, as seconds since 1970; None if it is invalid."""
    for read in (email.utils.parsedate_to_datetime, datetime.fromisoformat):
        try:
            found = read(date)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):  # OverflowError: a year beyond all calendars
            pass
    return None
