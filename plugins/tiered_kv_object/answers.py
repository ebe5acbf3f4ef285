"""obstore's errors as verdicts, and as sentences that name the bucket, the fault, the identity and the remedy.

`ObjectClient` and the control call it, on their threads. obstore has classes for some faults only, and one
`GenericError` for the rest, whose text has the status and the body of the answer, or the system's words.
"""

from __future__ import annotations

import html
import re
from typing import Final

from tiered_kv.toolkit.objects.verdict import Verdict

_STATUS: Final = re.compile(r"(?:status |\()code: (\d{3})([A-Za-z ]*)")
"""The status of an answer, or of one object in Azure's answer for several."""
_CODE: Final = re.compile(r"<Code>\s*([A-Za-z0-9.]{1,100})\s*</")
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,1000})</")
_URL: Final = re.compile(r"\w+://\S+")
_TRANSPORT: Final = (
    (Verdict.UNTRUSTED, ("certificate",)),
    (Verdict.TIMEOUT, ("timed out", "TimedOut")),
    (Verdict.UNAVAILABLE, ("refused", "dns error", "tcp connect", "error trying to connect", "client error (Connect)")),
)
"""Verdicts of requests without an answer, by words of obstore's text. The first that fits counts."""
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "ResourceNotFound"})
_FULL: Final = frozenset({"InsufficientStorage", "AccountStorageQuotaExceeded", "QuotaExceeded"})
_OF_TOKENS: Final = ("token request", "Azure CLI", "IMDS")
NO_TOKEN: Final = "no token"
NO_TOKEN_IN_TIME: Final = "or no server gave a token"
_TOOK: Final = re.compile(r" in [\d.]+[^\s\d]{1,2}(?= - )")
_SYSTEM_WORDS: Final = re.compile(r'(?:message|error): "([^"]{1,200})"')
"""The words of the system in obstore's details, such as "Connection refused"."""


def verdict_of(error: Exception) -> Verdict:
    """Return the verdict on a request for one object that raised `error`."""
    text = str(error)
    found, code = _STATUS.search(text), _code_in(text)
    if any(words in text for words in _OF_TOKENS):
        return Verdict.UNAVAILABLE  # of the server that gives tokens: the bucket was not asked
    if code in _NO_BUCKET:
        return Verdict.NO_BUCKET
    if isinstance(error, FileNotFoundError):
        return Verdict.ABSENT
    status = int(found[1]) if found else 0
    if status in (409, 412) or type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
        return Verdict.PRESENT
    if code in _FULL or status == 507:
        return Verdict.NO_SPACE
    if status:
        return _of_status(status)
    for verdict, words in _TRANSPORT:
        if any(word in text for word in words):
            return verdict
    if isinstance(error, ValueError) or type(error).__name__ == "InvalidPathError":
        return Verdict.REFUSED  # such as of a listing with a foreign name that obstore does not accept
    return Verdict.BROKEN  # neither an answer nor a known fault of the connection: it was cut off, or is not HTTP


def has_answer(error: Exception) -> bool:
    """Return whether the server has answered with a status."""
    return _STATUS.search(str(error)) is not None


def _of_status(status: int) -> Verdict:
    if status == 404:
        return Verdict.NO_BUCKET  # of a listing
    if status in (429, 503):
        return Verdict.SLOW_DOWN
    if status == 401:
        return Verdict.CREDENTIALS_EXPIRED
    if status == 403:
        return Verdict.DENIED
    if status == 408 or (status >= 500 and status != 501):
        return Verdict.UNAVAILABLE
    return Verdict.REFUSED


def words_of(error: Exception) -> str:
    """Return the server's or the system's words, without URLs: a signature may be part of one."""
    text, _, details = str(error).partition("\n\nDebug source")
    text = _TOOK.sub("", text)
    status = _STATUS.search(text)
    if any(words in text for words in _OF_TOKENS):
        return f"{NO_TOKEN}: {_URL.sub('its server', text)}"
    if status is None:
        system = _SYSTEM_WORDS.search(details)
        return _URL.sub("the server", system[1] if system else text)
    message = _MESSAGE.search(text)
    said = [_code_in(text), message[1] if message else ""]
    return html.unescape(": ".join(filter(None, said))) or f"HTTP status {status[1]}{status[2].rstrip()}"


def _code_in(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


_RIGHTS: Final = {
    "gcs": "give it storage.objects.get, .create, .delete and .list, such as by the role Storage Object User",
    "azure": "give it the role Storage Blob Data Contributor, on the container or above",
}


def sentence(kind: str, place: str, identity: str, reason: str, words: str, operation: str = "") -> str:
    """Return the fault of a bucket or container, and the remedy. `words` have no secret; `kind` is the tier's type."""
    said: dict[str, tuple[str, str]] = {
        Verdict.UNAVAILABLE: ("does not serve requests", "see whether 'endpoint' is right, and the server runs"),
        Verdict.TIMEOUT: (
            "does not answer in time",
            "see whether the server is overloaded or a firewall drops packets, or raise 'request_timeout'",
        ),
        Verdict.BROKEN: ("ends connections, or does not answer as expected", "correct 'endpoint'"),
        Verdict.SLOW_DOWN: ("asks for fewer requests", "lower 'connections', or wait"),
        Verdict.NO_SPACE: ("has no room left", "raise the quota, or lower 'capacity'"),
        Verdict.UNTRUSTED: ("has a certificate that is refused", "set 'ca_file' to the file of its authority"),
        Verdict.CREDENTIALS_EXPIRED: (f"refuses {identity}", "renew the credentials"),
        Verdict.DENIED: (f"refuses {identity} the request to {operation or 'use it'}", _RIGHTS[kind]),
        Verdict.NO_BUCKET: ("does not exist", "make it, or correct its name"),
        Verdict.REFUSED: ("refuses the request as invalid", "see whether 'endpoint' speaks this cloud's protocol"),
    }
    problem, remedy = said.get(reason, ("fails", ""))
    if words.startswith(NO_TOKEN):
        problem, remedy = f"cannot be asked as {identity}", "give this machine an identity, or the tier a key"
    elif words.startswith(NO_TOKEN_IN_TIME):
        remedy = f"{remedy}; or give this machine an identity, or the tier a key"
    elif "failed to lookup" in words:
        remedy = "correct the host in 'endpoint', or this machine's DNS"
    elif reason == Verdict.DENIED and ("AuthenticationFailed" in words or "failed to authenticate" in words):
        problem, remedy = f"refuses {identity}", "correct or renew it"  # a wrong key, or a signature that has expired
    detail = words if reason in set(Verdict) else ": ".join(filter(None, (reason, words)))
    return f"{place} {problem}" + (f" ({detail})" if detail else "") + (f"; {remedy}" if remedy else "")
