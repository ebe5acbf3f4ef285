"""HTTP/1.1 connections to the bucket's server. They send bodies from the caller's memory, and receive into it.

The standard library's client parses headers with the e-mail package, which takes longer than signing the request. S3
needs only a little of HTTP: requests and answers of a known length. The client reads an answer of unknown length only
for its error code.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tiered_kv.counters import Counters
from tiered_kv.errors import ConfigError
from tiered_kv.toolkit.resolver import connect
from tiered_kv.toolkit.small_files import rest_of
from tiered_kv_s3.endpoint import Endpoint, Proxy

HEAD_BYTES_MAX = 64 << 10
"""Status line and headers of an answer."""
ERROR_BYTES_MAX = 64 << 10
"""Body of an answer that is read for its error code."""
INTERIM_ANSWERS_MAX = 4
"""Answers such as "100 Continue" before the final one."""
IDLE_S_MAX = 15.0
"""The longest pause after which a connection is used again: S3 closes idle ones after 20 seconds or so."""

_HEAD_END = b"\r\n\r\n"
_BUFFER_BYTES = 4096
_TLS_SEND_BYTES = 256 << 10
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: |$)")


class BadAnswerError(ConnectionError):
    """The answer is not HTTP as S3 uses it, or ends too early."""


@dataclass(slots=True)
class Patience:
    """The time limits of a request: it ends at `deadline`, by `time.monotonic()`, or after `stall_s` without a byte."""

    deadline: float
    stall_s: float

    def next_timeout_s(self) -> float:
        """Return how long the next step may wait; `TimeoutError` once the deadline has passed."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the job's deadline has passed")
        return min(left_s, self.stall_s)


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer."""

    status: int
    headers: Mapping[str, str]  # by lower-case name; the last of several
    body_bytes: int | None  # None if the answer does not say


class Connection:
    """A connected socket. One thread at a time.

    Every method raises `OSError` if the connection fails: `TimeoutError`, `ConnectionError` or `ssl.SSLError`. The
    connection cannot be used after that.
    """

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, patience: Patience) -> None:
        self.endpoint = endpoint
        self.patience = patience
        """The limits of the current request; its sender sets them."""
        self.is_reusable = False
        """Whether the last answer was read to its end and the server keeps the connection."""
        peer = endpoint.proxy or endpoint
        self._socket = plain = connect(peer.host, peer.port, patience.next_timeout_s)
        self._is_tls = False
        self._keeps_open = False
        self._buffer = bytearray()  # received, and not yet consumed
        try:
            if endpoint.proxy is not None and tls is not None:
                self._open_tunnel(endpoint.proxy)
            plain.settimeout(patience.next_timeout_s())
            self._socket = tls.wrap_socket(plain, server_hostname=endpoint.host) if tls else plain
        except BaseException:
            plain.close()
            raise
        self.fileno = self._socket.fileno()
        self._is_tls = tls is not None

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send a request: its head, and the pieces of its body."""
        self.is_reusable = False
        waiting = [memoryview(piece) for piece in pieces]
        if self._is_tls:
            for piece in waiting:
                for at in range(0, len(piece), _TLS_SEND_BYTES):
                    self._socket.settimeout(self.patience.next_timeout_s())
                    self._socket.sendall(piece[at : at + _TLS_SEND_BYTES])
            return
        while waiting:
            self._socket.settimeout(self.patience.next_timeout_s())
            waiting = rest_of(waiting, self._socket.sendmsg(waiting))

    def receive_head(self, *, has_body: bool = True) -> Answer:
        """Receive the head of the answer to the request that was sent; `has_body` is False for HEAD."""
        for _ in range(INTERIM_ANSWERS_MAX):
            answer, keeps_open = _parse_head(self._read_head())
            if answer.status >= 200:
                break
        else:
            raise BadAnswerError("too many interim answers")
        if not has_body or answer.status in (204, 304):
            answer = Answer(answer.status, answer.headers, 0)
        self._keeps_open = keeps_open
        self.is_reusable = keeps_open and answer.body_bytes == 0 and not self._buffer
        return answer

    def receive_body(self, parts: Sequence[memoryview]) -> None:
        """Receive the whole body of the answer into `parts`, which are as long as it is."""
        for part in parts:
            self._receive_into(part)
        self.is_reusable = self._keeps_open and not self._buffer

    def receive_error(self, answer: Answer) -> bytes:
        """Receive the body of a failure, at most `ERROR_BYTES_MAX`; the framing of a chunked one stays in it."""
        size = answer.body_bytes
        if size is not None and size <= ERROR_BYTES_MAX:
            body = bytearray(size)
            self.receive_body([memoryview(body)])
            return bytes(body)
        while len(self._buffer) < ERROR_BYTES_MAX and not self._buffer.endswith(b"0\r\n\r\n"):
            if not self._fill():
                break
        return bytes(self._buffer[:ERROR_BYTES_MAX])

    def is_usable(self) -> bool:
        """Return whether an idle connection is still open, with no unexpected bytes received."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Make the calls that wait on this connection fail; any thread."""
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, whose state its user's thread owns

    def close(self) -> None:
        self.is_reusable = False
        self._socket.close()

    def _open_tunnel(self, proxy: Proxy) -> None:
        address = self.endpoint.address
        self.send([f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{proxy.authorization}\r\n".encode()])
        if not 200 <= self.receive_head().status < 300:
            raise ConnectionRefusedError("the proxy does not connect to the server")
        if self._buffer:  # a TLS server sends nothing before the client does
            raise BadAnswerError("the proxy sends more than an answer")

    def _read_head(self) -> bytes:
        searched = 0
        while (found := self._buffer.find(_HEAD_END, searched)) < 0:
            searched = max(0, len(self._buffer) - len(_HEAD_END) + 1)
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise BadAnswerError("the head of the answer is too long")
            if not self._fill():
                raise BadAnswerError("the server closed the connection before it answered")
        head = bytes(self._buffer[:found])
        del self._buffer[: found + len(_HEAD_END)]
        return head

    def _fill(self) -> int:
        self._socket.settimeout(self.patience.next_timeout_s())
        received = self._socket.recv(_BUFFER_BYTES)
        self._buffer += received
        return len(received)

    def _receive_into(self, part: memoryview) -> None:
        position = min(len(self._buffer), len(part))
        if position:
            part[:position] = self._buffer[:position]
            del self._buffer[:position]
        while position < len(part):
            self._socket.settimeout(self.patience.next_timeout_s())
            received = self._socket.recv_into(part[position:])
            if not received:
                raise BadAnswerError("the body of the answer is cut off")
            position += received


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
        connection = Connection(self.endpoint, self._tls, patience)
        self._counters.add("opened_connections_total")
        with self._lock:
            if not self._is_closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("the tier is being shut down")

    def give_back(self, connection: Connection, *, reuse: bool = True) -> None:
        """Keep a connection for later requests if it is reusable; else close it."""
        with self._lock:
            self._used.discard(connection)
            if reuse and connection.is_reusable and not self._is_closed:
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


def _parse_head(head: bytes) -> tuple[Answer, bool]:
    """Return an answer, and whether its server keeps the connection open after it."""
    first, *lines = head.split(b"\r\n")
    status = _STATUS_LINE.match(first)
    if status is None:
        raise BadAnswerError("the answer does not begin as HTTP/1 does")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise BadAnswerError("the answer has a header without a colon")
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    length = headers.get("content-length", "")
    if length and not (length.isascii() and length.isdigit() and len(length) < 19):
        raise BadAnswerError("the answer has no valid length")
    body_bytes = int(length) if length and "transfer-encoding" not in headers else None
    connection = headers.get("connection", "").lower()
    keeps_open = "close" not in connection and (status[1] == b"1" or "keep-alive" in connection)
    return Answer(int(status[2]), headers, body_bytes), keeps_open
