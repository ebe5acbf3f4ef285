"""redis-py's connections, which connect, encrypt and authenticate, with a `Link` for blocks.

redis-py copies a block several times, so blocks use the connection's socket directly.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from contextlib import closing, suppress
from typing import Any, Final

from redis.connection import AbstractConnection, Connection, SSLConnection
from redis.connection import UnixDomainSocketConnection as RedisUnixConnection

from tiered_kv.toolkit.resolver import connect
from tiered_kv_redis.replies import ReplyReader, Stream, TlsStream

_CONNECT_MIN_S = 0.001
_TLS_RECORDS: Final = (b"\x15", b"\x16")
"""First bytes of an alert and of a handshake: RFC 8446, section 5.1."""


class SendRoom:
    """Memory for encrypted payloads until they have been sent; one thread at a time.

    It grows to what one call sends, and is then reused.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(b"")
        self._end = 0

    def take(self, size: int) -> memoryview:
        """Return `size` bytes with undefined content, valid until `clear`."""
        if self._end + size > len(self._buffer):
            # Earlier results keep the old buffer until they have been sent.
            self._buffer, self._end = memoryview(bytearray(self._end + size)), 0
        self._end += size
        return self._buffer[self._end - size : self._end]

    def clear(self) -> None:
        self._end = 0


class Link:
    """A connected socket, with or without TLS, and its buffers; one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.stream = TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else Stream(sock)
        self.replies = ReplyReader(self.stream)
        self.room = SendRoom()
        self.fd = sock.fileno()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def is_quiet(self) -> bool:
        """Return whether nothing has arrived unrequested, such as the end of the connection."""
        return not self.replies.buffered_bytes and not self.stream.pending_bytes() and not self._poll.poll(0)


class FirstReplyConnection(AbstractConnection):
    """A server that turns a client away says why in its first reply, before any command."""

    def __init__(self, **settings: Any) -> None:  # Any: redis-py's
        super().__init__(**settings)
        # With these set, redis-py sends CLIENT SETINFO first, and ignores the reply.
        self.lib_name = self.lib_version = self.driver_info = None

    def can_read(self, timeout: float = 0) -> bool:
        """Raise the server's error instead of returning True, after which the pool would connect again."""
        is_readable: bool = super().can_read(timeout)
        if is_readable:
            self.read_response()
        return is_readable


class UnixConnection(FirstReplyConnection, RedisUnixConnection):
    """Over a Unix socket."""


class TcpConnection(FirstReplyConnection, Connection):
    """Connects within `connect_timeout`, with the look-up of the name, which redis-py does not bound."""

    def _connect(self) -> socket.socket:
        timeout_s = self.socket_connect_timeout
        assert timeout_s is not None, "endpoint.py sets it"
        deadline = time.monotonic() + timeout_s
        sock = connect(self.host, self.port, lambda: max(_CONNECT_MIN_S, deadline - time.monotonic()))
        sock.settimeout(self.socket_timeout)
        return sock


class TlsConnection(SSLConnection, TcpConnection):
    """The same over TLS."""


def speaks_other(host: str, port: int, *, tls: bool, timeout_s: float) -> bool:
    """Return whether a server speaks Redis without TLS if `tls` is set, or TLS if it is not: asks it over a new socket.

    A server without TLS waits for the end of a handshake's line for ever, and one with TLS closes the connection.
    """
    deadline = time.monotonic() + timeout_s
    request, replies = (b"PING\r\n", (b"+", b"-")) if tls else (_hello(host), _TLS_RECORDS)

    def left_s() -> float:
        return max(_CONNECT_MIN_S, deadline - time.monotonic())

    with suppress(OSError), closing(connect(host, port, left_s)) as sock:
        sock.settimeout(left_s())
        sock.sendall(request)
        return sock.recv(1) in replies
    return False


def _hello(host: str) -> bytes:
    """Return the first message of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.wrap_bio(incoming, outgoing, server_hostname=host).do_handshake()
    return outgoing.read()


class WireConnection(Connection):
    """Any connection, with what `Node` sets."""

    link: Link
    opened_s: float  # of `time.monotonic()`, before it was connected
