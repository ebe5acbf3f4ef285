"""The arguments for redis-py's connections."""

from __future__ import annotations

import ssl
from typing import Any

from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.connection import UnixDomainSocketConnection
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from tiered_kv.errors import ConfigError
from tiered_kv_redis.connection import TcpConnection, TlsConnection
from tiered_kv_redis.settings import Address, RedisSettings

Options = dict[str, Any]  # Any: redis-py's keyword arguments

_OTHER_CALLERS_MAX = 16
"""Threads that may have a connection to a server besides those for transfers: for lookups, a description, closing."""


def pool_options(settings: RedisSettings, address: Address | None) -> Options:
    """Return the arguments of a `ConnectionPool` for the server at `address`, or on the Unix socket."""
    connections_max = settings.connections + _OTHER_CALLERS_MAX
    options = {**common_options(settings), "max_connections": connections_max, "db": settings.db}
    if address is None:
        return {**options, "path": settings.socket, "connection_class": UnixDomainSocketConnection}
    kind = TlsConnection if settings.tls else TcpConnection
    tls = tls_options(settings) if settings.tls else {}
    return {**options, **tls, "host": address.host, "port": address.port, "connection_class": kind}


def sentinel_options(settings: RedisSettings) -> Options:
    """Return the arguments for redis-py's connections to sentinels."""
    tls = {"ssl": True, **tls_options(settings)} if settings.tls else {}
    credentials = _credentials(settings.sentinel_username, settings.sentinel_password)
    return {**common_options(settings), **tls, "credential_provider": credentials}


def common_options(settings: RedisSettings) -> Options:
    """Return the arguments of every connection."""
    return {
        # In version 2 of the protocol a server sends only replies.
        "protocol": 2,
        # One attempt: the caller decides about the next.
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": settings.connect_timeout,
        "socket_connect_timeout": settings.connect_timeout,
        "credential_provider": _credentials(settings.username, settings.password),
    }


def tls_options(settings: RedisSettings) -> Options:
    """Return redis-py's names for the settings of TLS."""
    password = settings.tls_key_password
    return {
        "ssl_ca_certs": settings.tls_ca,
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
        "ssl_password": _text_of(password),
        "ssl_cert_reqs": "required" if settings.tls_verify else "none",
        "ssl_check_hostname": settings.tls_verify,
    }


def check_tls_files(settings: RedisSettings) -> None:
    """Read certificates and key once: redis-py reads them with each connection, where a bad one looks like no server.

    Raises:
        ConfigError: One cannot be read, or is invalid.
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
    """Return a provider of the password, so that no printed argument contains it."""
    if username is None and password is None:
        return None
    return UsernamePasswordCredentialProvider(
        None if username is None else username.get_secret_value(), _text_of(password)
    )


def _text_of(secret: SecretStr | None) -> str:
    """Return a secret; an empty text for none, since OpenSSL asks at the terminal for a password that is not given."""
    return "" if secret is None else secret.get_secret_value()
