"""Connections to Redis servers: their classes, the arguments from which redis-py makes them, and a `Link` for blocks.

redis-py connects, encrypts and authenticates. It copies a block several times, so blocks use the connection's socket
directly, through the `Link`.

`topology` asks for the arguments. `node.Node` makes a `Link` for each connection, keeps the idle ones, and lends each
to one thread at a time. The thread that opens the tier, its worker threads and its background threads call. What must
stay true: redis-py makes one attempt, with a timeout, and printed arguments show no password.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from contextlib import closing, suppress
from typing import Any, Final

from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection
from redis.connection import UnixDomainSocketConnection as RedisUnixConnection
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from tiered_kv.errors import ConfigError
from tiered_kv.toolkit.resolver import connect
from tiered_kv_redis.replies import ReplyReader, Stream, TlsStream
from tiered_kv_redis.settings import Address, RedisSettings

_CONNECT_MIN_S = 0.001
_TLS_RECORDS: Final = (b"\x15", b"\x16")  # first bytes of an alert and of a handshake: RFC 8446, section 5.1


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
    """A connection of redis-py, its socket with or without TLS, and its buffers; one thread at a time."""

    def __init__(
        self, connection: Connection, sock: socket.socket, opened_s: float, silence_s: float = math.inf
    ) -> None:
        self.connection = connection
        self.opened_s = opened_s
        """When the connection began to be made, in seconds of `time.monotonic()`."""
        self.stream = (TlsStream if isinstance(sock, ssl.SSLSocket) else Stream)(sock, silence_s)
        self.replies = ReplyReader(self.stream)
        self.room = SendRoom()
        self.fd = sock.fileno()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def is_quiet(self) -> bool:
        """Return whether nothing has arrived unrequested, such as the end of the connection."""
        return not (self.replies.buffered_bytes or self.stream.pending_bytes() or self._poll.poll(0))


class FirstReplyConnection(AbstractConnection):
    """A connection that raises the error of a server that turns this client away.

    Such a server sends the error as its first reply, before any command.
    """

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
    pass


class TcpConnection(FirstReplyConnection, Connection):
    """A TCP connection. `connect_timeout` includes the look-up of the name, which redis-py does not limit."""

    def _connect(self) -> socket.socket:
        timeout_s = self.socket_connect_timeout
        assert timeout_s is not None, "`_common_options` sets it"
        deadline = time.monotonic() + timeout_s
        sock = connect(self.host, self.port, lambda: max(_CONNECT_MIN_S, deadline - time.monotonic()))
        sock.settimeout(self.socket_timeout)
        return sock


class TlsConnection(SSLConnection, TcpConnection):
    """A connection over TLS."""


def speaks_other(host: str, port: int, *, tls: bool, timeout_s: float) -> bool:
    """Return whether a server speaks the other protocol: Redis without TLS if `tls` is set, TLS if it is not.

    It asks over a new socket, since a failed connection does not show the cause. A server without TLS takes a handshake
    for an unfinished line, and waits. A server with TLS closes the connection.
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


Options = dict[str, Any]  # Any: redis-py's keyword arguments

_OTHER_CONNECTIONS_MAX = 16  # connections to a server beside those for transfers: for lookups, a description, closing


def pool_options(settings: RedisSettings, address: Address | None) -> Options:
    """Return the arguments of a `ConnectionPool` for the server at `address`, or on the Unix socket."""
    connections_max = settings.connections + _OTHER_CONNECTIONS_MAX
    options = {**_common_options(settings), "max_connections": connections_max, "db": settings.db}
    if address is None:
        return {**options, "path": settings.socket, "connection_class": UnixConnection}
    return {**options, **_address_options(settings, address)}


def sentinel_options(settings: RedisSettings, sentinel: Address) -> Options:
    credentials = _credentials(settings.sentinel_username, settings.sentinel_password)
    return {**_common_options(settings), **_address_options(settings, sentinel), "credential_provider": credentials}


def _address_options(settings: RedisSettings, address: Address) -> Options:
    options: Options = {"connection_class": TcpConnection, "host": address.host, "port": address.port}
    if not settings.tls:
        return options
    return {
        **options,
        "connection_class": TlsConnection,
        "ssl_ca_certs": settings.tls_ca,
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
        "ssl_password": _text_of(settings.tls_key_password),
        "ssl_cert_reqs": "required" if settings.tls_verify else "none",
        "ssl_check_hostname": settings.tls_verify,
    }


def _common_options(settings: RedisSettings) -> Options:
    return {
        "protocol": 2,  # in this version a server sends nothing but replies
        "retry": Retry(NoBackoff(), 0),  # one attempt: the caller decides about the next
        "socket_timeout": settings.connect_timeout,
        "socket_connect_timeout": settings.connect_timeout,
        "credential_provider": _credentials(settings.username, settings.password),
    }


def check_tls_files(settings: RedisSettings) -> None:
    """Read certificates and key once: with a bad file, redis-py fails at each connection as if there were no server.

    Raises `ConfigError`: a file cannot be read, or is invalid.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    setting, what = "tls_ca", "a file of CA certificates in PEM format"
    try:
        if settings.tls_ca is not None:
            context.load_verify_locations(settings.tls_ca)
        if settings.tls_cert is not None:
            setting, what = "tls_cert", "a file with a certificate in PEM format"
            context.load_verify_locations(settings.tls_cert)
            setting = "tls_key" if settings.tls_key else "tls_cert"
            what = "a file with the certificate's private key in PEM format, and its 'tls_key_password' if it has one"
            context.load_cert_chain(settings.tls_cert, settings.tls_key, _text_of(settings.tls_key_password))
    except OSError as error:
        why = "not usable as such" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"'{setting}': expected {what}, found {getattr(settings, setting)}: {why}") from None


def _credentials(username: SecretStr | None, password: SecretStr | None) -> UsernamePasswordCredentialProvider | None:
    """Return a provider of the password: printed arguments do not contain it."""
    if username is None and password is None:
        return None
    return UsernamePasswordCredentialProvider(
        None if username is None else username.get_secret_value(), _text_of(password)
    )


def _text_of(secret: SecretStr | None) -> str:
    """Return a secret; without one an empty string, since OpenSSL asks for a missing password at the terminal."""
    return "" if secret is None else secret.get_secret_value()
