"""One server: its connections, and whether it is down."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from redis import Redis
from redis.connection import ConnectionPool
from redis.exceptions import RedisError, ResponseError

from tiered_kv.toolkit.background import BackgroundTask
from tiered_kv_redis.connection import Link, WireConnection
from tiered_kv_redis.reasons import TOO_LONG, UNAVAILABLE, UNUSABLE, NodeError, reason_of_error

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 2.0
_PROBE_NAME = "tkv1:probe"  # no block has it


class Node:
    """A server and the connections to it. Any thread may call.

    After a failure the server is down: `take` fails at once, so its keys cost no time. A background thread probes it
    after 50 ms and then after twice as long each time, up to two seconds, until it answers. `on_failure` is called
    after each failure, also of a probe.
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
        # Idle connections, outside the pool: its check of each would cost as much as a small block.
        self._idle: deque[WireConnection] = deque()
        self._down_reason = ""  # empty while the server is in use; any thread sets it, the prober clears it
        self._prober = BackgroundTask(self._probe, "tiered-kv-redis-probe")

    @property
    def has_connection(self) -> bool:
        """Whether `take` returns without connecting, which may take long."""
        return bool(self._idle)

    @property
    def is_down(self) -> bool:
        """Whether the server failed, and no probe has succeeded since."""
        return bool(self._down_reason)

    def take(self) -> WireConnection:
        """Return an open connection without unread bytes; call `give_back` or `drop` after use.

        Raises:
            NodeError: The server is down, or cannot be connected to.
        """
        if self._closing.is_set():
            raise NodeError(UNAVAILABLE)
        reason = self._down_reason
        if reason:
            self._prober.ask()  # it runs already, unless no thread could be started
            raise NodeError(reason)
        try:
            return self._open()
        except (RedisError, OSError) as error:
            reason = reason_of_error(error)
        self.note_failure(reason)
        raise NodeError(reason)

    def give_back(self, connection: WireConnection) -> None:
        """Keep a connection on which every reply has been read."""
        self._idle.append(connection)
        if self._closing.is_set():
            self._close_idle()

    def drop(self, connection: WireConnection, reason: str) -> None:
        """Close a connection that may have unread bytes; with a `reason`, the server failed."""
        self._close(connection)
        if reason and reason != TOO_LONG:  # which a client caused, not the server
            self.note_failure(reason)

    def note_failure(self, reason: str) -> None:
        """Stop using the server until a probe succeeds."""
        if not self._closing.is_set():
            self._down_reason = reason
            self._prober.ask()
        self._close_idle()
        self._on_failure()

    def client(self) -> Redis:
        """Return a redis-py client with separate connections; close it after use."""
        return Redis.from_pool(ConnectionPool(**self._pool_settings))

    def memory_limit(self) -> tuple[int, str] | None:
        """Return the server's `maxmemory` in bytes (0: no limit) and its policy; None if it refuses INFO."""
        with contextlib.closing(self.client()) as client, contextlib.suppress(RedisError, OSError):
            memory = client.info("memory")
            return int(memory["maxmemory"]), str(memory["maxmemory_policy"])
        return None

    def retire(self) -> None:
        """Close the connections to a server that has no blocks any more; those in use when they are given back."""
        self._closing.set()
        self._close_idle()

    def close(self) -> None:
        """Close every connection, also those in use; none is opened any more."""
        self._closing.set()
        self._pool.disconnect()
        self._idle.clear()

    def join(self, timeout_s: float) -> None:
        """After `close`, wait for the background thread."""
        self._prober.join(timeout_s)

    def _open(self) -> WireConnection:
        with contextlib.suppress(IndexError):
            connection = self._idle.pop()
            if connection.link.is_quiet():
                return connection
            self._pool.release(connection)  # the pool checks it, and connects again
        connection = cast(WireConnection, self._pool.get_connection())
        if self._closing.is_set():
            self._close(connection)
            raise ConnectionError("the tier was closed")
        connection.link = Link(connection._sock)  # type: ignore[arg-type]  # it is connected
        self._on_connect()
        return connection

    def _close(self, connection: WireConnection) -> None:
        connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
        self._pool.release(connection)

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._close(self._idle.pop())

    def _probe(self) -> None:
        pause_s = _PAUSE_MIN_S
        while self._down_reason and not self._closing.wait(pause_s * random.uniform(0.5, 1.0)):
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            try:
                reason = self._probe_once()
            except Exception as error:  # redis-py may raise any exception for invalid replies
                reason = reason_of_error(error)
            self._down_reason = reason
            if reason:
                self._on_failure()

    def _probe_once(self) -> str:
        """Send the server a request; return why it cannot be used, or an empty string."""
        with contextlib.closing(self.client()) as client:
            try:
                client.strlen(_PROBE_NAME)
            except ResponseError as error:  # such as MOVED, an answer: this member does not have the name
                reason = reason_of_error(error)
                return reason if reason in UNUSABLE else ""
        return ""
