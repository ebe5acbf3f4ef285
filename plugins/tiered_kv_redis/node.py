"""One server, as the tier's threads use it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from tiered_kv_redis.connection import WireConnection
from tiered_kv_redis.reasons import TOO_LONG, reason_of_error

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 2.0
STORE_PAUSE_S = 1.0
"""How long a server that is full or read-only is not offered blocks."""


class NodeDownError(Exception):
    """No connection to a server is to be had now.

    Args:
        reason: One word for the counters.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Node:
    """A server and the connections to it. Any thread may call.

    After a failure the server is left alone for a while, twice as long after each that follows, up to two seconds.

    Args:
        label: Its address, for people.
        pool_settings: What redis-py's `ConnectionPool` is made with.
        on_connect: Called when a connection was made.
    """

    def __init__(
        self,
        label: str,
        pool_settings: Mapping[str, Any],  # Any: redis-py's
        on_connect: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = label
        self._on_connect = on_connect
        self._pool = ConnectionPool(**pool_settings)
        # Connections that have been used; the pool's own check of each would cost as much as a small block.
        self._idle: deque[WireConnection] = deque()
        self._lock = threading.Lock()  # guards the rest
        self._failures = 0
        self._try_at = 0.0
        self._reason = ""
        self._store_at = 0.0
        self._store_refusal = ""
        self._is_retired = False

    def take(self) -> WireConnection:
        """Return a connection that is open and has nothing to be read; pair it with `give_back` or `drop`.

        Raises:
            NodeDownError: There is none, or the last attempt failed a moment ago.
        """
        with self._lock:
            if self._failures and time.monotonic() < self._try_at:
                raise NodeDownError(self._reason)
        try:
            with contextlib.suppress(IndexError):
                connection = self._idle.pop()
                if connection.link.is_quiet():
                    return connection
                self._pool.release(connection)  # the pool finds out why, and connects again
            connection = cast(WireConnection, self._pool.get_connection())
        except (RedisError, OSError) as error:
            reason = reason_of_error(error)
        else:
            connection.link.stream.start()
            self._on_connect()
            return connection
        self.note_failure(reason)
        raise NodeDownError(reason)

    def give_back(self, connection: WireConnection) -> None:
        """Take back a connection on which every reply has been read."""
        if self._failures:
            with self._lock:
                self._failures = 0
        if self._is_retired:
            connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
            self._pool.release(connection)
            return
        self._idle.append(connection)

    def drop(self, connection: WireConnection, reason: str) -> None:
        """Close a connection that may have something to be read."""
        connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
        self._pool.release(connection)
        if reason != TOO_LONG:  # which is a client's fault, not the server's
            self.note_failure(reason)

    def note_failure(self, reason: str) -> None:
        """Leave the server alone for a while."""
        with self._lock:
            self._failures += 1
            pause_s = min(_PAUSE_MAX_S, _PAUSE_MIN_S * 2.0 ** min(self._failures - 1, 16))
            self._try_at = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
            self._reason = reason

    def refuse_stores(self, reason: str) -> None:
        """Offer the server no blocks for a while: it has just refused some."""
        with self._lock:
            self._store_at = time.monotonic() + STORE_PAUSE_S
            self._store_refusal = reason

    @property
    def store_refusal(self) -> str:
        """Why the server is not offered blocks now; empty if it is."""
        return self._store_refusal if time.monotonic() < self._store_at else ""

    def retire(self) -> None:
        """Close the connections to a server that has no blocks any more: those in use when they are given back."""
        self._is_retired = True
        with contextlib.suppress(IndexError):
            while True:
                self.give_back(self._idle.pop())

    def close(self) -> None:
        """Close every connection, those in use too."""
        self._idle.clear()
        self._pool.disconnect()
