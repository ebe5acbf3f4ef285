"""Reasons of this tier's failures, as enums, and the sentences that explain them. Any thread uses them.

`Reason` has the reasons of all tiers, `ServerFailure` the reasons of this tier alone. If a block's server cannot be
used while other servers can, the reason is `Reason.UNANSWERED`: no failure of the tier.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Set
from enum import StrEnum
from typing import Final, TypeAlias

from redis.exceptions import (
    AskError,
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

from tiered_kv.config.secrets import foreign_text
from tiered_kv.reasons import Reason
from tiered_kv.toolkit.resolver import causes_of


class ServerFailure(StrEnum):
    """Reasons of this tier alone; the value is the word in the counters."""

    READ_ONLY = "readonly"
    MOVED = "moved"
    ASK = "ask"
    AUTH = "auth"
    CLUSTER_DOWN = "cluster_down"
    SERVER_ERROR = "server_error"
    LOADING = "loading"
    PROTOCOL = "protocol"
    CUT_OFF = "cut_off"
    QUERY_BUFFER = "query_buffer"
    OUTPUT_BUFFER = "output_buffer"
    PERMISSION = "permission"
    TLS = "tls"
    TOO_LONG = "too_long"
    WRONG_TYPE = "wrong_type"
    WITHOUT_TLS = "without_tls"
    WITH_TLS = "with_tls"


RedisReason: TypeAlias = Reason | ServerFailure

NO_FAILURE_OF_SERVER: Final[frozenset[RedisReason]] = frozenset(
    (ServerFailure.TOO_LONG, ServerFailure.CUT_OFF, ServerFailure.QUERY_BUFFER, ServerFailure.OUTPUT_BUFFER)
)
"""Reasons for the end of one connection. The server still answers on other connections."""

UNUSABLE: Final[frozenset[RedisReason]] = frozenset((ServerFailure.LOADING, ServerFailure.CLUSTER_DOWN))
"""Reasons in the replies of a server that cannot serve any block now."""

ELSEWHERE: Final[frozenset[RedisReason]] = frozenset((ServerFailure.MOVED, ServerFailure.ASK))
"""Reasons in the replies of a healthy server that has given the key's slot away, or is about to."""

OF_ONE_SERVER: Final[frozenset[RedisReason]] = UNUSABLE | {
    ServerFailure.ASK,
    Reason.BUSY,
    Reason.TIMEOUT,
    Reason.UNAVAILABLE,
    ServerFailure.AUTH,
    ServerFailure.TLS,
    ServerFailure.PROTOCOL,
}
"""Reasons that concern one server only."""

UNLIKE: Final[frozenset[RedisReason]] = frozenset(
    (Reason.TIMEOUT, Reason.UNAVAILABLE, ServerFailure.PROTOCOL, ServerFailure.TLS)
)
"""Reasons that also arise if the server speaks TLS and this client does not, or the reverse."""

REFUSALS: Final[frozenset[RedisReason]] = frozenset(
    (
        ServerFailure.AUTH,
        ServerFailure.PERMISSION,
        ServerFailure.SERVER_ERROR,
        ServerFailure.TLS,
        ServerFailure.WITHOUT_TLS,
        ServerFailure.WITH_TLS,
    )
)
"""Permanent failures: the tier is not opened."""

_IS_SAID: Final[Mapping[RedisReason, tuple[str, str]]] = {
    ServerFailure.AUTH: (
        "refuses the user or password, or clients of other machines",
        "check 'username', 'password' and its 'protected-mode'",
    ),
    ServerFailure.PERMISSION: (
        "does not permit what this tier does",
        "its user needs +get +set +strlen +unlink on keys 'tkv1:*', with a 'ttl' also +pexpire, "
        "in a cluster also +cluster|slots",
    ),
    ServerFailure.SERVER_ERROR: (
        "answers with an error",
        "check 'db', and that it is a Redis of the 'mode' that is set",
    ),
    ServerFailure.TLS: (
        "does not pass the check of its certificate, or offers no TLS",
        "set 'tls_ca' to the file of its authority, or connect by a name that the certificate has",
    ),
    ServerFailure.WITHOUT_TLS: ("does not speak TLS", "write 'redis://' in place of 'rediss://', or leave 'tls' out"),
    ServerFailure.WITH_TLS: ("speaks TLS only", "write 'rediss://' in place of 'redis://', or set 'tls: true'"),
    Reason.UNAVAILABLE: ("cannot be reached", "start it, or correct its address in the stack"),
    Reason.TIMEOUT: (
        "does not answer in time",
        "see whether it is overloaded or a firewall drops packets, or raise 'timeout' and 'connect_timeout'",
    ),
    ServerFailure.PROTOCOL: ("does not answer as Redis does", "correct its address in the stack, or 'tls'"),
    ServerFailure.READ_ONLY: ("takes no writes", "give the address of the master, or see why it cannot save its data"),
    Reason.NO_SPACE: ("has no memory left", "raise its 'maxmemory', or set its 'maxmemory-policy' to allkeys-lru"),
    ServerFailure.LOADING: ("is still loading its data", "wait until it has"),
    Reason.BUSY: ("is busy with a script", "wait, or end the script"),
    ServerFailure.CLUSTER_DOWN: (
        "has no masters for its slots",
        "see what CLUSTER INFO says, and start the missing masters",
    ),
    ServerFailure.QUERY_BUFFER: (
        "closes connections that send it a block",
        "raise its 'client-query-buffer-limit' and 'proto-max-bulk-len' above the size of a block",
    ),
    ServerFailure.OUTPUT_BUFFER: (
        "closes connections to which it sends a block",
        "raise its 'client-output-buffer-limit normal' above two blocks",
    ),
}
_SAID_BY_WORDS: Final[Mapping[str, tuple[str, str]]] = {
    "max number of clients": (
        "has as many clients as it takes",
        "raise its 'maxclients' and its limit of open files, or lower 'connections'",
    ),
    "protected mode": (
        "takes no clients of other machines",
        "give it a password ('requirepass') and set it as 'password', or turn its 'protected-mode' off",
    ),
    "invalid username-password": (
        "refuses the user or password",
        "correct 'username' and 'password'; after a change of the password, start this process with the new one",
    ),
    "Authentication required": ("refuses the user or password", "set 'password'"),
    "error: unauthenticated": ("refuses the user or password", "set 'password'"),
    "no password is set": ("has no password", "remove 'password', or set its 'requirepass'"),
    "DB index is out of range": ("has no such database", "correct 'db', or raise its 'databases'"),
    "stop-writes-on-bgsave-error": (
        "cannot save its data, and takes no writes",
        "free its disk or correct its 'dir'. If it is only a cache, set its 'save' to \"\"",
    ),
    "Errors writing to the AOF": (
        "cannot write its log, and takes no writes",
        "free its disk. If it is only a cache, set its 'appendonly' to no",
    ),
    "read only replica": (
        "is a replica, and takes no writes",
        "give the address of the master, or use mode 'sentinel', which follows it",
    ),
    "good replicas": ("has too few replicas to take writes", "start them, or lower its 'min-replicas-to-write'"),
    "invalid bulk length": (
        "takes no value as long as a block",
        "raise its 'proto-max-bulk-len' above the size of a block",
    ),
}
"""Problem and remedy by words in a server's text. They count before `_IS_SAID`, which has them by reason."""
_UNKNOWN_HOST: Final = ("not known", "name resolution", "no address")
"""Words in the resolver's text about a host without an address."""

_BY_CODE: Final[Mapping[bytes, RedisReason]] = {
    b"OOM": Reason.NO_SPACE,
    b"READONLY": ServerFailure.READ_ONLY,
    b"MISCONF": ServerFailure.READ_ONLY,
    b"NOREPLICAS": ServerFailure.READ_ONLY,
    b"LOADING": ServerFailure.LOADING,
    b"MOVED": ServerFailure.MOVED,
    b"ASK": ServerFailure.ASK,
    b"TRYAGAIN": ServerFailure.ASK,
    b"CROSSSLOT": ServerFailure.ASK,
    b"CLUSTERDOWN": ServerFailure.CLUSTER_DOWN,
    b"MASTERDOWN": ServerFailure.CLUSTER_DOWN,
    b"NOAUTH": ServerFailure.AUTH,
    b"WRONGPASS": ServerFailure.AUTH,
    b"DENIED": ServerFailure.AUTH,
    b"NOPERM": ServerFailure.PERMISSION,
    b"WRONGTYPE": ServerFailure.WRONG_TYPE,
    b"BUSY": Reason.BUSY,
}
_NOT_SERVED: Final = "Hash slot not served"
"""A cluster member's text after CLUSTERDOWN: this slot has no server, and other slots have one."""
_UNAUTHENTICATED: Final = "Protocol error: unauthenticated"
"""A server's text for a block from a client without a password: it refuses the length before it reads the command."""
_BY_TEXT: Final[Mapping[bytes, RedisReason]] = {
    _NOT_SERVED.encode(): ServerFailure.MOVED,
    b"max number of clients": Reason.UNAVAILABLE,
    _UNAUTHENTICATED.encode(): ServerFailure.AUTH,
}
"""Reasons by the beginning of the text after the code. They count before `_BY_CODE`."""

_BY_TYPE: Final[Mapping[type[BaseException], RedisReason]] = {
    AuthenticationError: ServerFailure.AUTH,
    NoPermissionError: ServerFailure.PERMISSION,
    ssl.SSLCertVerificationError: ServerFailure.TLS,
    BusyLoadingError: ServerFailure.LOADING,
    MovedError: ServerFailure.MOVED,
    AskError: ServerFailure.ASK,
    RedisTimeoutError: Reason.TIMEOUT,
    TimeoutError: Reason.TIMEOUT,
    ssl.SSLError: ServerFailure.TLS,
    ClusterError: ServerFailure.CLUSTER_DOWN,
    ReadOnlyError: ServerFailure.READ_ONLY,
    OutOfMemoryError: Reason.NO_SPACE,
    ResponseError: ServerFailure.SERVER_ERROR,
}
"""Reasons by the type of an exception or of its cause. The first type that fits counts."""


class NodeError(Exception):
    """A server cannot be used now, or sent an invalid reply."""

    def __init__(self, reason: RedisReason) -> None:
        self.reason = reason
        super().__init__(reason)


def reason_of_code(line: bytes) -> RedisReason:
    """Return the reason for an error reply, such as b"OOM command not allowed ..."."""
    code, _, text = line.partition(b" ")
    for beginning, reason in _BY_TEXT.items():
        if text.startswith(beginning):
            return reason
    return _BY_CODE.get(code, ServerFailure.SERVER_ERROR)


def sentence(endpoints: str, reason: RedisReason, text: str, secrets: Set[str], *, wants: str = "") -> str:
    """Return the problem of the servers at `endpoints`, the `text` of a server or library, and the remedy.

    `wants` replaces the usual remedy.
    """
    problem, remedy = _IS_SAID.get(reason, (f"fails: {reason}", ""))
    problem, remedy = next((said for words, said in _SAID_BY_WORDS.items() if words in text), (problem, remedy))
    if any(each in text for each in _UNKNOWN_HOST):
        remedy = "correct the host's name in the stack, or this machine's DNS"
    who = "one of the servers" if ", " in endpoints else "the server"
    shown = foreign_text(text, secrets)
    message = f"{who} {endpoints} {problem}" + (f" ({shown})" if shown else "")
    return f"{message}; {wants or remedy}" if wants or remedy else message


def reason_of_error(error: BaseException) -> RedisReason:
    """Return the reason for an exception of a socket or redis-py, from its type and the types of its causes."""
    if isinstance(error, NodeError):
        return error.reason
    chain = causes_of(error)
    if isinstance(error, ClusterError) and str(error).startswith(_NOT_SERVED):
        return ServerFailure.MOVED
    if type(error) is ResponseError:  # redis-py does not know the code, and leaves it in the text
        return reason_of_code(str(error).encode())
    for kind, reason in _BY_TYPE.items():
        if any(isinstance(each, kind) for each in chain):
            return reason
    return Reason.UNAVAILABLE if isinstance(error, (OSError, RedisError)) else Reason.ERROR
