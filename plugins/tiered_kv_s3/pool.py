"""Connections to the bucket's server: opens them, and keeps a pool of open ones.

The tier's workers take one for each request, and give it back. A connection has one user at a time. After an error it
is closed.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time

from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import Counters
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.resolver import connect
from tiered_kv_s3.connection import Connection, Endpoint, Patience, Proxy

IDLE_S_MAX = 15.0
"""The longest pause after which a connection is used again: S3 closes idle ones after 20 seconds or so."""


def open_connection(endpoint: Endpoint, tls: ssl.SSLContext | None, patience: Patience) -> Connection:
    """Return a new connection. Raises `OSError`: no address of the server answers in time."""
    peer = endpoint.proxy or endpoint
    plain = connect(peer.host, peer.port, patience.next_timeout_s)
    try:
        if tls is None:
            return Connection(endpoint, plain, patience)
        if endpoint.proxy is not None:
            _tunnel(endpoint, plain, endpoint.proxy, patience)
        plain.settimeout(patience.next_timeout_s())
        return Connection(endpoint, tls.wrap_socket(plain, server_hostname=endpoint.host), patience)
    except BaseException:
        plain.close()
        raise


def _tunnel(endpoint: Endpoint, plain: socket.socket, proxy: Proxy, patience: Patience) -> None:
    """Let a proxy connect to the server."""
    to_proxy = Connection(endpoint, plain, patience)
    address = endpoint.address
    to_proxy.send([f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{proxy.authorization}\r\n".encode()])
    if not 200 <= to_proxy.receive_head().status < 300:
        raise ConnectionRefusedError("the proxy does not connect to the server")


class ConnectionPool:
    """Connections to one endpoint; `take` prefers the one that was used last. Any thread may call.

    The callers bound how many are in use. Raises `ConfigError`: `ca_file` cannot be read, or holds no certificate.
    """

    def __init__(self, endpoint: Endpoint, ca_file: str | None, counters: Counters) -> None:
        self._tls = tls_context(ca_file) if endpoint.is_tls else None
        self._counters = counters
        self.endpoint = endpoint
        self._lock = threading.Lock()  # guards the fields below; no thread holds it across I/O
        self._idle: list[tuple[float, Connection]] = []
        """Idle connections, each with the time of its last use. The connection that was used last is at the end."""
        self._used: set[Connection] = set()
        self._is_closed = False

    @property
    def open_connections(self) -> int:
        return len(self._idle) + len(self._used)

    def take(self, patience: Patience) -> Connection:
        """Return a connection for one request; only the caller uses it, until `give_back`.

        Raises `OSError`: no connection could be opened.
        """
        return self._take_idle(patience) or self._open(patience)

    def take_many(self, count: int, patience: Patience, *, may_open: bool) -> list[Connection]:
        """Return up to `count` connections. Missing ones are opened in parallel, if `may_open` or if none is idle.

        Raises `OSError`: there is none, and none could be opened.
        """
        taken = [connection for _ in range(count) if (connection := self._take_idle(patience)) is not None]
        missing = count - len(taken) if may_open or not taken else 0
        opened = run_all(lambda _: self._open(patience), range(missing), "tiered-kv-s3-opening", missing)
        taken += [each.result() for each in opened if each.exception() is None]
        return taken or [opened[0].result()]  # raises

    def _open(self, patience: Patience) -> Connection:
        connection = open_connection(self.endpoint, self._tls, patience)
        self._counters.add("opened_connections_total")
        with self._lock:
            if not self._is_closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("the tier is being shut down")

    def _take_idle(self, patience: Patience) -> Connection | None:
        while self._idle:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
                self._used.add(connection)
            if time.monotonic() - since < IDLE_S_MAX and connection.is_usable():
                connection.patience = patience
                return connection
            connection.is_reusable = False
            self.give_back(connection)
        return None

    def move(self, endpoint: Endpoint) -> None:
        """From now on, open connections to another endpoint, with or without TLS as before. Close the idle ones."""
        with self._lock:
            self.endpoint = endpoint
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for later requests if it is reusable; else close it."""
        with self._lock:
            self._used.discard(connection)
            if connection.is_reusable and connection.endpoint is self.endpoint and not self._is_closed:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Close the idle connections, make the used ones fail, and open no more."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:  # under the lock: the descriptor of a closed connection may be reused
                connection.abort()
        for _, connection in idle:
            connection.close()


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return the context that verifies server certificates: by the system's authorities, or by `ca_file` alone.

    Raises `ConfigError`: the file cannot be read, or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"no certificates can be read: {error.strerror}", location="ca_file") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
