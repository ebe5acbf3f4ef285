"""One server: its connections, and whether it is down.

The tier's workers call it, several at once. A background thread probes a server that is down; meanwhile every request
to it fails at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from redis import Redis
from redis.connection import Connection, ConnectionPool
from redis.exceptions import RedisError, ResponseError

from tiered_kv.reasons import Reason
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.threads import BackgroundTask
from tiered_kv.toolkit.resolver import words_of
from tiered_kv_redis import reasons as why
from tiered_kv_redis.connection import Link
from tiered_kv_redis.reasons import NodeError, RedisReason, reason_of_error

_log = logging.getLogger(__name__)

_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 2.0
_RENEW_PAUSE_S = 0.5
_NARROW_S = 600.0
"""How long loads ask for fewer bytes at once, after a closed connection. It ends, as a proxy may be the cause."""
_PROBE_NAME = "tkv1:probe"  # no block has it


class ServerMemory(NamedTuple):
    """What a server says of its memory."""

    limit_bytes: int  # `maxmemory`; 0: no limit
    policy: str
    allocator: str


class Node:
    """A server and the connections to it. Any thread may call.

    After a failure the server is down: `take` fails at once, so its keys cost no time. A background thread probes it
    after 50 ms and then after twice as long each time, up to two seconds, until it answers. `on_connect` is called
    after each new connection, and `on_failure` after each failure, also of a probe: both on any thread.

    Attributes:
        said: The last text of a server or library, by reason; the servers of a tier share it.
        silence_s: How long it may neither send nor take a byte during an exchange.
    """

    def __init__(
        self,
        label: str,
        pool_settings: Mapping[str, Any],  # Any: redis-py's
        on_connect: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
        said: MutableMapping[RedisReason, str] | None = None,
        silence_s: float = math.inf,
    ) -> None:
        self.label = label
        self.silence_s = silence_s
        self.said: MutableMapping[RedisReason, str] = {} if said is None else said
        self._pending_bytes_max: int | None = None
        self._narrow_until_s = -math.inf
        """Until when `_pending_bytes_max` holds, in seconds of `time.monotonic()`."""
        self._is_cut_off = False  # a connection was closed while replies were pending, and no load has ended since
        self._limit = LogLimit()
        self._on_connect = on_connect
        self._on_failure = on_failure
        self._closing = threading.Event()
        self._pool_settings = pool_settings
        self._pool = ConnectionPool(**pool_settings)
        # Idle connections, outside the pool: its check of each would cost as much as a small block.
        self._idle: deque[Link] = deque()
        self._down_reason: RedisReason | None = (
            None  # None while the server is in use; any thread sets it, the prober clears it
        )
        self._renewed_s = -math.inf  # time of the last `renew`; connections opened before are not used again
        self._prober = BackgroundTask(self._probe, "tiered-kv-redis-probe")

    @property
    def has_connection(self) -> bool:
        """Whether `take` returns without connecting, which may take long."""
        return bool(self._idle)

    @property
    def pending_bytes_max(self) -> int | None:
        """Bytes of replies that loads may have pending here, if fewer than usual."""
        return self._pending_bytes_max if time.monotonic() < self._narrow_until_s else None

    @property
    def is_down(self) -> bool:
        """Whether the server failed, and no probe has succeeded since."""
        return self._down_reason is not None

    def take(self) -> Link:
        """Return an open connection without unread bytes; call `give_back` or `drop` after use.

        Raises `NodeError`: the server is down, or cannot be connected to.
        """
        if self._closing.is_set():
            raise NodeError(Reason.UNAVAILABLE)
        reason = self._down_reason
        if reason is not None:
            self._prober.ask()  # it runs already, unless no thread could be started
            raise NodeError(reason)
        try:
            return self._open()
        except (RedisError, OSError) as error:
            reason = self._reason_of(error)
        self.note_failure(reason)
        raise NodeError(reason)

    def give_back(self, link: Link) -> None:
        """Keep a connection on which every reply has been read."""
        if link.opened_s < self._renewed_s:
            self._close(link.connection)
            return
        self._idle.append(link)
        if self._closing.is_set():
            self._close_idle()

    def renew(self) -> None:
        """Use new connections from now on, at most twice a second: the address may lead to another server.

        A server that refuses stores is a former master, and it keeps its connections open.
        """
        now_s = time.monotonic()
        if now_s - self._renewed_s >= _RENEW_PAUSE_S:
            self._renewed_s = now_s
            self._close_idle()
            self._on_failure()

    def narrow(self, pending_bytes_max: int) -> None:
        """Limit the pending replies of loads to these bytes, for `_NARROW_S` or until a probe succeeds."""
        self._is_cut_off = True
        self._pending_bytes_max = min(self.pending_bytes_max or pending_bytes_max, pending_bytes_max)
        self._narrow_until_s = time.monotonic() + _NARROW_S

    def note_loaded(self) -> None:
        """Note that a load has ended. If a connection was closed before it, the cause was no outage: log that."""
        if self._is_cut_off:
            self._is_cut_off = False
            if self._limit.take() is not None:
                _log.warning(
                    "%s closed a connection while replies were pending; loads now ask for less at once. "
                    "If that comes again, raise its 'client-output-buffer-limit' or lower 'pipeline'",
                    self.label,
                )

    def answers(self) -> bool:
        """Return whether the server answers on a new connection; waits for `connect_timeout` at most for each step."""
        try:
            return not self._closing.is_set() and not self._probe_once()
        except Exception:  # redis-py may raise any exception for invalid replies
            return False

    def drop(self, link: Link, reason: RedisReason | None) -> None:
        """Close a connection that may have unread bytes; with a `reason`, the server failed."""
        self._close(link.connection)
        if reason is not None and reason not in why.NO_FAILURE_OF_SERVER:
            self.note_failure(reason)

    def note_failure(self, reason: RedisReason) -> None:
        """Stop using the server until a probe succeeds."""
        self._is_cut_off = False
        if not self._closing.is_set():
            self._down_reason = reason
            self._prober.ask()
        self._close_idle()
        self._on_failure()

    def client(self) -> Redis:
        """Return a redis-py client with separate connections; close it after use."""
        return Redis.from_pool(ConnectionPool(**self._pool_settings))

    def memory(self) -> ServerMemory | None:
        """Ask the server for its limit; return None if it refuses INFO."""
        with contextlib.closing(self.client()) as client, contextlib.suppress(RedisError, OSError):
            found = client.info("memory")
            limit, policy = int(found["maxmemory"]), str(found["maxmemory_policy"])
            return ServerMemory(limit, policy, str(found.get("mem_allocator", "unknown")))
        return None

    def retire(self) -> None:
        """Close the idle connections to a server that has no blocks any more. Used ones are closed when they are given
        back."""
        self._closing.set()
        self._close_idle()

    def close(self) -> None:
        """Close every connection, also the ones in use; none is opened any more."""
        self._closing.set()
        self._pool.disconnect()
        self._idle.clear()

    def join(self, timeout_s: float) -> None:
        """After `close`, wait for the background thread."""
        self._prober.join(timeout_s)

    def _open(self) -> Link:
        with contextlib.suppress(IndexError):
            link = self._idle.pop()
            if link.is_quiet():
                return link
            self._close(link.connection)  # the pool connects again
        opened_s = time.monotonic()
        connection = self._pool.get_connection()
        sock = connection._sock
        if self._closing.is_set() or sock is None:
            self._close(connection)
            raise ConnectionError("the tier was closed")
        self._on_connect()
        return Link(connection, sock, opened_s, self.silence_s)

    def _close(self, connection: Connection) -> None:
        connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py annotates some of its methods only
        self._pool.release(connection)

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._close(self._idle.pop().connection)

    def _probe(self) -> None:
        pause_s = _PAUSE_MIN_S
        while self._down_reason is not None and not self._closing.wait(pause_s * random.uniform(0.5, 1.0)):
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            try:
                reason = self._probe_once()
            except Exception as error:  # redis-py may raise any exception for invalid replies
                reason = self._reason_of(error)
            if reason is None:
                self._narrow_until_s = -math.inf  # a server that was started again may have another limit
            self._down_reason = reason
            if reason is not None:
                self._on_failure()

    def _probe_once(self) -> RedisReason | None:
        """Send the server a request; return why it cannot be used."""
        with contextlib.closing(self.client()) as client:
            try:
                client.strlen(_PROBE_NAME)
            except ResponseError as error:  # such as MOVED, an answer: this member does not have the name
                reason = self._reason_of(error)
                return reason if reason in why.UNUSABLE else None
        return None

    def _reason_of(self, error: Exception) -> RedisReason:
        reason = reason_of_error(error)
        self.said[reason] = words_of(error)
        return reason
