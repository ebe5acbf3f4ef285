"""Reasons of failures, one word each, as in the counters."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Set
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from tiered_kv.config.redaction import foreign_text
from tiered_kv.toolkit.resolver import note_refused

ABSENT: Final = "absent"
READ_ONLY: Final = "readonly"
MOVED: Final = "moved"
TIMEOUT: Final = "timeout"
UNAVAILABLE: Final = "unavailable"
AUTH: Final = "auth"
CLUSTER_DOWN: Final = "cluster_down"
SERVER_ERROR: Final = "server_error"
LOADING: Final = "loading"
BUSY: Final = "busy"
PROTOCOL: Final = "protocol"
CUT_OFF: Final = "cut_off"
PERMISSION: Final = "permission"
TLS: Final = "tls"
TOO_LONG: Final = "too_long"
WRONG_TYPE: Final = "wrong_type"

NO_FAILURE_OF_SERVER: Final = frozenset((TOO_LONG, CUT_OFF))
"""Reasons why a connection ended that this client caused."""

UNANSWERED: Final = "unanswered"
"""The server of a job's blocks cannot be used, while others can: no failure of the tier."""

UNUSABLE: Final = frozenset((LOADING, CLUSTER_DOWN))
"""Replies of a server that can serve nothing now."""

OF_ONE_SERVER: Final = UNUSABLE | {BUSY, TIMEOUT, UNAVAILABLE, AUTH, TLS, PROTOCOL}
"""Reasons that concern one server only."""

REFUSAL_ADVICE: Final = {
    AUTH: "refuses the user or password, or clients of other machines; check 'username', 'password' and its "
    "'protected-mode'",
    PERMISSION: "does not permit what this tier does; its user needs +get +set +strlen +unlink "
    "on keys 'tkv1:*', in a cluster also +cluster|slots",
    SERVER_ERROR: "answers with an error; check 'db', and that it is a Redis of the 'mode' that is set",
    TLS: "does not pass the check of its certificate; check 'tls_ca' and the host name (the log says more), or "
    "offers no TLS",
}
"""What to do about permanent failures."""

_BY_CODE: Final = {
    b"OOM": "no_space",
    b"READONLY": READ_ONLY,
    b"MISCONF": READ_ONLY,
    b"NOREPLICAS": READ_ONLY,
    b"LOADING": LOADING,
    b"MOVED": MOVED,
    b"ASK": "ask",
    b"TRYAGAIN": "ask",
    b"CROSSSLOT": "ask",
    b"CLUSTERDOWN": CLUSTER_DOWN,
    b"MASTERDOWN": CLUSTER_DOWN,
    b"NOAUTH": AUTH,
    b"WRONGPASS": AUTH,
    b"DENIED": AUTH,
    b"NOPERM": PERMISSION,
    b"WRONGTYPE": WRONG_TYPE,
    b"BUSY": BUSY,
}
_NOT_SERVED: Final = "Hash slot not served"
"""A member's text, after CLUSTERDOWN, if one slot has no server and other slots have."""
_BY_TEXT: Final = {_NOT_SERVED.encode(): MOVED, b"max number of clients": UNAVAILABLE}
"""By the beginning of the text after the code, before the code counts."""

_BY_TYPE: Final[Mapping[type[BaseException], str]] = {
    AuthenticationError: AUTH,
    NoPermissionError: PERMISSION,
    ssl.SSLCertVerificationError: TLS,
    BusyLoadingError: LOADING,
    MovedError: MOVED,
    RedisTimeoutError: TIMEOUT,
    TimeoutError: TIMEOUT,
    ssl.SSLError: TLS,
    ClusterError: CLUSTER_DOWN,
    ReadOnlyError: READ_ONLY,
    OutOfMemoryError: _BY_CODE[b"OOM"],
    ResponseError: SERVER_ERROR,
}
"""The first type that fits counts."""


class NodeError(Exception):
    """A server cannot be used now, or sent an invalid reply."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def reason_of_code(line: bytes) -> str:
    """Return the reason for an error reply, such as b"OOM command not allowed ..."."""
    code, _, text = line.partition(b" ")
    for beginning, reason in _BY_TEXT.items():
        if text.startswith(beginning):
            return reason
    return _BY_CODE.get(code, SERVER_ERROR)


def with_text(message: str, text: str, secrets: Set[str]) -> str:
    """Return `message` with the `text` of a server or library."""
    shown = foreign_text(text, secrets)
    return f"{message} ({shown})" if shown else message


def reason_of_error(error: BaseException) -> str:
    """Return the reason for an exception of a socket or redis-py, by it and its causes."""
    if isinstance(error, NodeError):
        return error.reason
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:  # an exception that was raised again may be among its own causes
        chain.append(link)
        link = link.__cause__ or link.__context__
    for each in chain:
        if isinstance(each, ssl.SSLCertVerificationError):
            note_refused(each)
    if isinstance(error, ClusterError) and str(error).startswith(_NOT_SERVED):
        return MOVED
    if type(error) is ResponseError:  # one whose code redis-py does not know, and leaves in the text
        return reason_of_code(str(error).encode())
    for kind, reason in _BY_TYPE.items():
        if any(isinstance(each, kind) for each in chain):
            return reason
    return UNAVAILABLE if isinstance(error, (OSError, RedisError)) else "error"
