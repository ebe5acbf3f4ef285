"""Opening connections to the bucket's server without waiting, and a pool of open ones."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Generator

from tiered_kv.errors import ConfigError
from tiered_kv.metrics.instruments import Counters
from tiered_kv.toolkit.resolver import addresses_of
from tiered_kv_s3.connection import BadAnswerError, Connection, Endpoint, Patience, Proxy

IDLE_S_MAX = 15.0
"""The longest pause after which a connection is used again: S3 closes idle ones after 20 seconds or so."""

Step = tuple[socket.socket, int]
"""What an opening waits for: a socket, and an event of `select.poll`."""


def opening(endpoint: Endpoint, tls: ssl.SSLContext | None, patience: Patience) -> Generator[Step, None, Connection]:
    """Open a connection without waiting for the server, and return it; the caller waits for each step.

    If a step takes too long, throw `TimeoutError` in: the next address is tried. Only the look-up of a name waits.

    Raises:
        OSError: No address of the server answers.
    """
    peer = endpoint.proxy or endpoint
    failure = OSError(f"{peer.host} has no address")
    for family, kind, protocol, _, address in addresses_of(peer.host, peer.port, patience.next_timeout_s()):
        plain = socket.socket(family, kind, protocol)
        try:
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (code := plain.connect_ex(address)) == errno.EINPROGRESS:
                yield plain, select.POLLOUT
                code = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if tls is None:
                return Connection(endpoint, plain, patience)
            if endpoint.proxy is not None:
                yield from _tunnel(endpoint, plain, endpoint.proxy, patience)
            return Connection(endpoint, (yield from _wrapped(plain, tls, endpoint.host)), patience)
        except OSError as error:
            plain.close()
            failure = error
        except BaseException:
            plain.close()
            raise
    raise failure


def open_connection(endpoint: Endpoint, tls: ssl.SSLContext | None, patience: Patience) -> Connection:
    """Return a new connection; raises as `opening`, and `TimeoutError`."""
    steps = opening(endpoint, tls, patience)
    try:
        waited, event = next(steps)
        while True:
            poll = select.poll()
            poll.register(waited, event)
            is_ready = poll.poll(patience.next_timeout_s() * 1000)
            waited, event = next(steps) if is_ready else steps.throw(TimeoutError("the server does not answer"))
    except StopIteration as end:
        connection: Connection = end.value
        return connection
    finally:
        steps.close()


def _tunnel(endpoint: Endpoint, plain: socket.socket, proxy: Proxy, patience: Patience) -> Generator[Step, None, None]:
    """Let a proxy connect to the server."""
    to_proxy = Connection(endpoint, plain, patience)
    address = endpoint.address
    to_proxy.send([f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{proxy.authorization}\r\n".encode()])
    yield plain, select.POLLIN
    if not 200 <= to_proxy.receive_head().status < 300:
        raise ConnectionRefusedError("the proxy does not connect to the server")
    if not to_proxy.is_drained:  # a TLS server sends nothing before the client does
        raise BadAnswerError("the proxy sends more than an answer")
    plain.setblocking(False)


def _wrapped(plain: socket.socket, tls: ssl.SSLContext, host: str) -> Generator[Step, None, ssl.SSLSocket]:
    """Return a connected socket with TLS."""
    wrapped = tls.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    try:
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                yield wrapped, select.POLLIN
            except ssl.SSLWantWriteError:
                yield wrapped, select.POLLOUT
    except BaseException:
        wrapped.close()
        raise


class ConnectionPool:
    """Connections to one endpoint; `take` prefers the one that was used last. Any thread may call.

    The callers bound how many are in use.

    Raises:
        ConfigError: The file cannot be read, or holds no certificate.
    """

    def __init__(self, endpoint: Endpoint, ca_file: str | None, counters: Counters) -> None:
        self._tls = tls_context(ca_file) if endpoint.is_tls else None
        self._counters = counters
        self.endpoint = endpoint
        self._lock = threading.Lock()  # guards the rest; never held across I/O
        self._idle: list[tuple[float, Connection]] = []
        self._used: set[Connection] = set()
        self._is_closed = False

    @property
    def open_connections(self) -> int:
        return len(self._idle) + len(self._used)

    def take(self, patience: Patience) -> Connection:
        """Return a connection for one request; only the caller uses it, until `give_back`.

        Raises:
            OSError: No connection could be opened.
        """
        return self.take_idle(patience) or self.adopt(open_connection(self.endpoint, self._tls, patience))

    def take_idle(self, patience: Patience) -> Connection | None:
        """Return an open connection that nothing uses, if there is one."""
        while self._idle:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
                self._used.add(connection)
            if time.monotonic() - since < IDLE_S_MAX and connection.is_usable():
                connection.patience = patience
                return connection
            self.give_back(connection, reuse=False)
        return None

    def opening(self, patience: Patience) -> Generator[Step, None, Connection]:
        """Return the opening of another connection, for `adopt`."""
        return opening(self.endpoint, self._tls, patience)

    def adopt(self, connection: Connection) -> Connection:
        """Return a new connection, which is in use from now on."""
        self._counters.add("opened_connections_total")
        with self._lock:
            if not self._is_closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("the tier is being shut down")

    def move(self, endpoint: Endpoint) -> None:
        """Open further connections to another endpoint, with or without TLS as before."""
        with self._lock:
            self.endpoint = endpoint
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def give_back(self, connection: Connection, *, reuse: bool = True) -> None:
        """Keep a connection for later requests if it is reusable; else close it."""
        with self._lock:
            self._used.discard(connection)
            is_kept = reuse and connection.is_reusable and connection.endpoint is self.endpoint
            if is_kept and not self._is_closed:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Close the idle connections, make the used ones fail, and open no more."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:  # under the lock: else it may be closed, and its number reused
                connection.abort()
        for _, connection in idle:
            connection.close()


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return the context that verifies server certificates: by the system's authorities, or by `ca_file` alone.

    Raises:
        ConfigError: The file cannot be read, or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"no certificates can be read: {error.strerror}", location="ca_file") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
