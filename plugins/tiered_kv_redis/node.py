"""One server, as the tier's threads use it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis import Redis
from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from tiered_kv_redis.connection import WireConnection
from tiered_kv_redis.reasons import BUSY, TOO_LONG, UNAVAILABLE, reason_of_error

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 2.0
_CLOSE_WAIT_S = 0.5
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


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What limits a server's memory.

    Args:
        memory_bytes: Its `maxmemory`; 0 for no limit.
        policy: Its `maxmemory-policy`.
    """

    memory_bytes: int
    policy: str


class Node:
    """A server and the connections to it. Any thread may call.

    After a failure the server is down: `take` fails at once, so that its keys cost nobody time. A thread of its own
    tries to connect, after 50 ms and then twice as long each time, up to two seconds, until that succeeds.

    Args:
        label: Its address, for people.
        pool_settings: What redis-py's `ConnectionPool` is made with.
        on_connect: Called when a connection was made.
        on_failure: Called when the server failed, and when it could not be connected to again.
    """

    def __init__(
        self,
        label: str,
        pool_settings: Mapping[str, Any],  # Any: redis-py's
        on_connect: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = label
        self._on_connect = on_connect
        self._on_failure = on_failure
        self._closing = threading.Event()
        self._pool_settings = pool_settings
        self._pool = ConnectionPool(**pool_settings)
        # Connections that have been used; the pool's own check of each would cost as much as a small block.
        self._idle: deque[WireConnection] = deque()
        self._lock = threading.Lock()  # guards the rest
        self._failures = 0
        self._down_reason = ""  # empty while the server is in use
        self._prober: threading.Thread | None = None
        self._store_at = 0.0
        self._store_refusal = ""

    def take(self) -> WireConnection:
        """Return a connection that is open and has nothing to be read; pair it with `give_back` or `drop`.

        Raises:
            NodeDownError: There is none, or the server is down.
        """
        if self._closing.is_set():
            raise NodeDownError(UNAVAILABLE)
        reason = self._down_reason
        if reason:
            raise NodeDownError(reason)
        try:
            return self._open()
        except (RedisError, OSError) as error:
            reason = reason_of_error(error)
        if reason != BUSY:  # all connections are in use, of which the server knows nothing
            self.note_failure(reason)
        raise NodeDownError(reason)

    def client(self) -> Redis:
        """Return redis-py's client of the server, with connections of its own; close it after use."""
        return Redis.from_pool(ConnectionPool(**self._pool_settings))

    def memory_limit(self) -> MemoryLimit | None:
        """Ask the server for its limit; None where it does not answer, or the user has no right to ask."""
        with contextlib.closing(self.client()) as client, contextlib.suppress(RedisError, OSError):
            told = client.info("memory")
            return MemoryLimit(int(told["maxmemory"]), str(told["maxmemory_policy"]))
        return None

    @property
    def has_connection(self) -> bool:
        """Whether `take` need not connect, which may take long."""
        return bool(self._idle)

    @property
    def is_down(self) -> bool:
        """Whether the server failed, and could not be connected to since."""
        return bool(self._down_reason)

    def give_back(self, connection: WireConnection) -> None:
        """Take back a connection on which every reply has been read."""
        if self._failures:
            with self._lock:
                self._failures = 0
        self._idle.append(connection)
        if self._closing.is_set():
            self._close_idle()

    def drop(self, connection: WireConnection, reason: str) -> None:
        """Close a connection that may have something to be read.

        Args:
            connection: The connection.
            reason: What the server did wrong; empty if the server is not to blame.
        """
        connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
        self._pool.release(connection)
        if reason and reason != TOO_LONG:  # which is a client's fault, not the server's
            self.note_failure(reason)

    def note_failure(self, reason: str) -> None:
        """Use the server no more until it could be connected to."""
        with self._lock:
            self._failures += 1
            if not self._down_reason and not self._closing.is_set():
                prober = threading.Thread(target=self._probe, name="tiered-kv-redis-probe", daemon=True)
                try:
                    prober.start()
                except RuntimeError:  # no more threads to be had: whoever needs the server next tries it
                    return
                self._prober, self._down_reason = prober, reason
        self._close_idle()  # what is idle later was given back after an answer, and so shows that the server is back
        self._on_failure()

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
        self._closing.set()
        self._close_idle()

    def close(self) -> None:
        """Close every connection, those in use too; none is made any more."""
        self._closing.set()
        self._pool.disconnect()
        self._idle.clear()
        prober = self._prober
        if prober is not None:
            prober.join(_CLOSE_WAIT_S)  # if a server keeps it, it ends by itself, with what it opened

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
                self._pool.release(connection)

    def _open(self) -> WireConnection:
        with contextlib.suppress(IndexError):
            connection = self._idle.pop()
            if connection.link.is_quiet():
                return connection
            self._pool.release(connection)  # the pool finds out why, and connects again
        connection = cast(WireConnection, self._pool.get_connection())
        if self._closing.is_set():
            connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
            raise ConnectionError("the tier was closed")
        connection.link.stream.start()
        self._on_connect()
        return connection

    def _probe(self) -> None:
        """Connect to a server that is down until that succeeds; a thread of its own."""
        while not self._closing.wait(self._pause_s()):
            try:
                connection = self._open()
            except Exception as error:  # redis-py makes anything of a server that talks nonsense
                reason = reason_of_error(error)
                with self._lock:
                    self._failures += 1
                    if reason != BUSY:  # transfers that have not ended yet hold all connections
                        self._down_reason = reason
                self._on_failure()
            else:
                self._idle.append(connection)
                with self._lock:
                    self._down_reason = ""
                return

    def _pause_s(self) -> float:
        return min(_PAUSE_MAX_S, _PAUSE_MIN_S * 2.0 ** min(self._failures - 1, 16)) * random.uniform(0.5, 1.0)
