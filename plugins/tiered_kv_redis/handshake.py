"""What redis-py itself reads of a connection, bounded: the replies to a handshake, and where a cluster's slots are.

redis-py reads for as long as bytes come: its timeout is of one call, a reply may be of any length, and lists may stand
lists until the interpreter's stack is used up. So a server that means harm, or is none, could hold a thread for ever
and fill the memory. Here each connection may receive so much in this way, in so much time.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Final

from redis._parsers import _RESP2Parser
from redis.exceptions import InvalidResponse

from tiered_kv_redis.budget import Budget

TIMEOUTS_MAX: Final = 4
"""How many times the timeout of one call everything may take."""
_TOO_MUCH: Final = "the server sends more than an answer"


class BoundedParser(_RESP2Parser):
    """redis-py's parser of RESP2, over a socket that gives only so much."""

    def on_connect(self, connection: Any) -> None:  # Any: redis-py's connections, which share no typed interface
        super().on_connect(connection)  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
        timeout_s = connection.socket_timeout
        buffer: Any = self._buffer
        self._budget = Budget()
        buffer._sock = _BoundedSocket(buffer._sock, self._budget, TIMEOUTS_MAX * timeout_s)

    def read_response(self, *arguments: Any, **options: Any) -> Any:  # Any: as redis-py has it
        try:
            return super().read_response(*arguments, **options)
        except (RecursionError, ValueError, OverflowError) as error:  # lists in lists; a number that is none
            raise InvalidResponse(f"the server sends no reply: {type(error).__name__}") from None

    def _read_response(self, *arguments: Any, **options: Any) -> Any:  # Any: as redis-py has it
        # For each reply and, by recursion, for each item of a list: four bytes make an object.
        if not self._budget.take(0, 1):
            raise ConnectionError(_TOO_MUCH)
        return super()._read_response(*arguments, **options)


class _BoundedSocket:
    """A connected socket, as redis-py's buffer uses it.

    Args:
        sock: The socket.
        budget: What it may give.
        limit_s: How long everything may take, from now on.
    """

    def __init__(self, sock: socket.socket, budget: Budget, limit_s: float) -> None:
        self._sock = sock
        self._budget = budget
        self._deadline = time.monotonic() + limit_s

    def recv(self, size: int) -> bytes:
        if self._budget.left_bytes <= 0:
            raise ConnectionError(_TOO_MUCH)
        if time.monotonic() >= self._deadline:
            # No timeout: redis-py takes one for "nothing has come" where it looks whether a connection is quiet.
            raise ConnectionError("the server takes too long to send an answer")
        data = self._sock.recv(min(size, self._budget.left_bytes))
        self._budget.take(len(data))
        return data

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)
