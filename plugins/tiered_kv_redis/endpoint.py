"""The arguments for redis-py's connections."""

from __future__ import annotations

import ssl
from typing import Any

from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from tiered_kv.errors import ConfigError
from tiered_kv_redis.connection import TcpConnection, TlsConnection, UnixConnection
from tiered_kv_redis.settings import Address, RedisSettings

Options = dict[str, Any]  # Any: redis-py's keyword arguments

_OTHER_CONNECTIONS_MAX = 16
"""Connections to a server beside those for transfers: for lookups, a description, closing."""


def pool_options(settings: RedisSettings, address: Address | None) -> Options:
    """Return the arguments of a `ConnectionPool` for the server at `address`, or on the Unix socket."""
    connections_max = settings.connections + _OTHER_CONNECTIONS_MAX
    options = {**_common_options(settings), "max_connections": connections_max, "db": settings.db}
    if address is None:
        return {**options, "path": settings.socket, "connection_class": UnixConnection}
    return {**options, **_address_options(settings, address)}


def sentinel_options(settings: RedisSettings, sentinel: Address) -> Options:
    """Return the arguments of a `ConnectionPool` for a sentinel."""
    credentials = _credentials(settings.sentinel_username, settings.sentinel_password)
    return {**_common_options(settings), **_address_options(settings, sentinel), "credential_provider": credentials}


def _address_options(settings: RedisSettings, address: Address) -> Options:
    tls = {**_tls_options(settings), "connection_class": TlsConnection} if settings.tls else {}
    return {"connection_class": TcpConnection, **tls, "host": address.host, "port": address.port}


def _common_options(settings: RedisSettings) -> Options:
    return {
        "protocol": 2,  # in which a server sends nothing but replies
        "retry": Retry(NoBackoff(), 0),  # one attempt: the caller decides about the next
        "socket_timeout": settings.connect_timeout,
        "socket_connect_timeout": settings.connect_timeout,
        "credential_provider": _credentials(settings.username, settings.password),
    }


def _tls_options(settings: RedisSettings) -> Options:
    return {
        "ssl_ca_certs": settings.tls_ca,
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
        "ssl_password": _text_of(settings.tls_key_password),
        "ssl_cert_reqs": "required" if settings.tls_verify else "none",
        "ssl_check_hostname": settings.tls_verify,
    }


def check_tls_files(settings: RedisSettings) -> None:
    """Read certificates and key once: with a bad file, redis-py fails at each connection as if there were no server.

    Raises:
        ConfigError: A file cannot be read, or is invalid.
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
