"""HTTP/1.1 connections to the bucket's server: bodies are sent from, and received into, the caller's memory.

The standard library's client would do, but parses headers with the e-mail package, which takes longer than signing
the request. Only a little of HTTP is needed: requests and answers with a known length. Answers
of unknown length are read only for their error code.
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
"""Answers such as "100 Continue" before the one that counts."""
IDLE_S_MAX = 15.0
"""A connection that was not used for longer is not used again: S3 closes them after 20 seconds or so."""

_HEAD_END = b"\r\n\r\n"
_BUFFER_BYTES = 4096
_TLS_SEND_BYTES = 256 << 10
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: |$)")


class BadAnswerError(ConnectionError):
    """The answer is not HTTP as S3 uses it, or ends too early."""


@dataclass(slots=True)
class Patience:
    """How long a request may take: until `deadline`, by `time.monotonic()`, and without a byte for `stall_s`."""

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

    Every method raises `OSError` where the connection fails: `TimeoutError`, `ConnectionError` or `ssl.SSLError`; the
    connection is of no use then.
    """

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, patience: Patience) -> None:
        self.endpoint = endpoint
        self.is_reusable = False
        """Whether the last answer was read to its end and the server keeps the connection."""
        where = endpoint.proxy or endpoint
        self._socket = plain = connect(where.host, where.port, patience.next_timeout_s)
        self._is_tls = False
        self._keeps_open = False
        self._buffer = bytearray()  # received, and not yet asked for
        try:
            if endpoint.proxy is not None and tls is not None:
                self._open_tunnel(endpoint.proxy, patience)
            plain.settimeout(patience.next_timeout_s())
            self._socket = tls.wrap_socket(plain, server_hostname=endpoint.host) if tls else plain
        except BaseException:
            plain.close()
            raise
        self.fileno = self._socket.fileno()
        self._is_tls = tls is not None

    def send(self, pieces: Sequence[bytes | memoryview], patience: Patience) -> None:
        """Send a request: its head, and the pieces of its body."""
        self.is_reusable = False
        waiting = [memoryview(piece) for piece in pieces]
        if self._is_tls:
            for piece in waiting:
                for at in range(0, len(piece), _TLS_SEND_BYTES):
                    self._socket.settimeout(patience.next_timeout_s())
                    self._socket.sendall(piece[at : at + _TLS_SEND_BYTES])
            return
        while waiting:
            self._socket.settimeout(patience.next_timeout_s())
            waiting = rest_of(waiting, self._socket.sendmsg(waiting))

    def receive_head(self, patience: Patience, *, has_body: bool = True) -> Answer:
        """Receive the head of the answer to the request that was sent; `has_body` is False for HEAD."""
        for _ in range(INTERIM_ANSWERS_MAX):
            answer, keeps_open = _parse_head(self._read_until(_HEAD_END, patience))
            if answer.status >= 200:
                break
        else:
            raise BadAnswerError("too many interim answers")
        if not has_body or answer.status in (204, 304):
            answer = Answer(answer.status, answer.headers, 0)
        self._keeps_open = keeps_open
        self.is_reusable = keeps_open and answer.body_bytes == 0 and not self._buffer
        return answer

    def receive_body(self, parts: Sequence[memoryview], patience: Patience) -> None:
        """Receive the whole body of the answer into `parts`, which are as long as it is."""
        for part in parts:
            self._receive_into(part, patience)
        self.is_reusable = self._keeps_open and not self._buffer

    def receive_error(self, answer: Answer, patience: Patience) -> bytes:
        """Receive what the server says in an answer that is no success, bounded; chunks are left as they are."""
        size = answer.body_bytes
        if size is not None and size <= ERROR_BYTES_MAX:
            body = bytearray(size)
            self.receive_body([memoryview(body)], patience)
            return bytes(body)
        while len(self._buffer) < ERROR_BYTES_MAX and not self._buffer.endswith(b"0\r\n\r\n"):
            if not self._fill(patience):
                break
        return bytes(self._buffer[:ERROR_BYTES_MAX])

    def is_usable(self) -> bool:
        """Return whether a kept connection has not been closed by the server; nothing may arrive unasked."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Make calls that wait on this connection fail; any thread."""
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, whose state is the other thread's

    def close(self) -> None:
        self.is_reusable = False
        self._socket.close()

    def _open_tunnel(self, proxy: Proxy, patience: Patience) -> None:
        host = f"[{self.endpoint.host}]" if ":" in self.endpoint.host else self.endpoint.host
        authority = f"{host}:{self.endpoint.port}"
        lines = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{proxy.authorization}\r\n"
        self.send([lines.encode()], patience)
        if not 200 <= self.receive_head(patience).status < 300:
            raise ConnectionRefusedError("the proxy does not connect to the server")
        if self._buffer:  # under TLS a server is silent until it is spoken to
            raise BadAnswerError("the proxy sends more than an answer")

    def _read_until(self, end: bytes, patience: Patience) -> bytes:
        """Receive up to `end`, which is dropped."""
        searched = 0
        while (found := self._buffer.find(end, searched)) < 0:
            searched = max(0, len(self._buffer) - len(end) + 1)
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise BadAnswerError("the head of the answer is too long")
            if not self._fill(patience):
                raise BadAnswerError("the server closed the connection before it answered")
        line = bytes(self._buffer[:found])
        del self._buffer[: found + len(end)]
        return line

    def _fill(self, patience: Patience) -> int:
        self._socket.settimeout(patience.next_timeout_s())
        received = self._socket.recv(_BUFFER_BYTES)
        self._buffer += received
        return len(received)

    def _receive_into(self, part: memoryview, patience: Patience) -> None:
        position = min(len(self._buffer), len(part))
        if position:
            part[:position] = self._buffer[:position]
            del self._buffer[:position]
        while position < len(part):
            self._socket.settimeout(patience.next_timeout_s())
            received = self._socket.recv_into(part[position:])
            if not received:
                raise BadAnswerError("the body of the answer is cut off")
            position += received


class ConnectionPool:
    """Connections to one endpoint, the one that was used last first. Any thread may call.

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
        """Return a connection that is nobody else's until `give_back`.

        Raises:
            OSError: None could be opened.
        """
        while self._idle:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
                self._used.add(connection)
            if time.monotonic() - since < IDLE_S_MAX and connection.is_usable():
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
        """Take a connection back, to be used again if it can be."""
        with self._lock:
            self._used.discard(connection)
            if reuse and connection.is_reusable and not self._is_closed:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle, make what is in use fail, and open no more."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:  # under the lock, so that none is closed, and its number reused, meanwhile
                connection.abort()
        for _, connection in idle:
            connection.close()


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return what server certificates are verified with: the system's authorities, or those in `ca_file` alone.

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
        raise BadAnswerError("the answer has no sound length")
    body_bytes = int(length) if length and "transfer-encoding" not in headers else None
    wish = headers.get("connection", "").lower()
    keeps_open = "close" not in wish and (status[1] == b"1" or "keep-alive" in wish)
    return Answer(int(status[2]), headers, body_bytes), keeps_open
