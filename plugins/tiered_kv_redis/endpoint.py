"""What redis-py is told to make connections with."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from tiered_kv_redis.connection import TcpConnection, TlsConnection, UnixConnection
from tiered_kv_redis.settings import Address, RedisSettings

Options = dict[str, Any]  # Any: redis-py's keyword arguments


def pool_options(settings: RedisSettings, address: Address | None) -> Options:
    """Return the arguments of a `ConnectionPool` for the server at `address`, or on the Unix socket."""
    options = {**common_options(settings), "max_connections": settings.connections, "db": settings.db}
    # One attempt: `Node` says when the next is made.
    options["retry"] = Retry(NoBackoff(), 0)
    if address is None:
        return {**options, "path": settings.socket, "connection_class": UnixConnection}
    kind = TlsConnection if settings.tls else TcpConnection
    tls = tls_options(settings) if settings.tls else {}
    return {**options, **tls, "host": address.host, "port": address.port, "connection_class": kind}


def client_options(settings: RedisSettings) -> Options:
    """Return the arguments of a client of redis-py's own that asks a cluster for its topology."""
    tls = {"ssl": True, **tls_options(settings)} if settings.tls else {}
    return {**common_options(settings), **tls}


def sentinel_options(settings: RedisSettings) -> Options:
    """Return the arguments for redis-py's connections to sentinels."""
    options = client_options(settings)
    credentials = _credentials(settings.sentinel_username, settings.sentinel_password)
    return {**options, "credential_provider": credentials, "retry": Retry(NoBackoff(), 0)}


def common_options(settings: RedisSettings) -> Options:
    """Return what every connection is made with."""
    return {
        # In version 2 of the protocol a server says nothing unless it is asked.
        "protocol": 2,
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
        "ssl_password": None if password is None else password.get_secret_value(),
        "ssl_cert_reqs": "required" if settings.tls_verify else "none",
        "ssl_check_hostname": settings.tls_verify,
    }


def _credentials(username: SecretStr | None, password: SecretStr | None) -> UsernamePasswordCredentialProvider | None:
    """Return what hands the password over when a connection is made; nothing that is printed holds it."""
    if username is None and password is None:
        return None
    return UsernamePasswordCredentialProvider(
        None if username is None else username.get_secret_value(),
        "" if password is None else password.get_secret_value(),
    )
