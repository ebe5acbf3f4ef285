"""The YAML entry of a redis tier, and its needs of the process and the machine.

`config.stack_config` reads it on the thread that opens a stack. Importing it does not import redis-py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.config.secrets import STRAY_CHARACTER, stray_character
from tiered_kv.config.units import Bytes, Count, FilePath, Seconds
from tiered_kv.system.limits import Take
from tiered_kv.toolkit.codecs import CodecSettings
from tiered_kv_redis.allocators import KNOWN

_HOST_CHARACTERS = r"[^\s:/@\[\]]+"
_ADDRESS = re.compile(rf"(?:\[(?P<ipv6>[0-9A-Fa-f:.%]+)\]|(?P<host>{_HOST_CHARACTERS})):(?P<port>\d{{1,5}})")
_HOST = re.compile(rf"{_HOST_CHARACTERS}|[0-9A-Fa-f:.]+(%\w+)?")
_URL_ACCEPTED = "redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path/to/socket"


class Address(NamedTuple):
    host: str
    port: int


def _parse_address(text: str) -> Address:
    """Return the address in "host:port" or "[ipv6]:port"; raise `ValueError` for any other text."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError("expected host:port, such as 10.0.0.1:6379 or [::1]:6379")
    return Address(match["ipv6"] or match["host"], int(match["port"]))


class RedisSettings(CodecSettings):
    """Settings of the tier that keeps blocks in Redis.

    A user and a password in `url` are moved to `username` and `password` when the entry is read.
    """

    unknown_key_advice: ClassVar[Mapping[str, str]] = {
        **CodecSettings.unknown_key_advice,
        **dict.fromkeys(
            ("capacity", "quota"), "the limit is the server's 'maxmemory', with 'maxmemory-policy allkeys-lru'"
        ),
    }

    type: str = "redis"
    url: str | None = Field(default=None, description=f"The server: {_URL_ACCEPTED}. Or give `host` and `port`.")
    host: str | None = Field(default=None, min_length=1, description="The server's host; instead of `url`.")
    port: Count = Field(default=6379, ge=1, le=65535, description="The server's port.")
    socket: FilePath | None = Field(default=None, description="Path of a Unix socket; instead of `url`.")
    db: Count = Field(default=0, ge=0, description="Number of the database; a cluster has only 0.")
    mode: Literal["standalone", "sentinel", "cluster"] = Field(
        default="standalone", description="One server, the master that sentinels name, or a Redis Cluster."
    )
    nodes: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="host:port of some members of the cluster, or of the sentinels; besides `url` or `host`.",
    )
    service: str | None = Field(default=None, min_length=1, description="Name of the master that sentinels watch.")
    username: SecretStr | None = Field(default=None, description="User; Redis's `default` without it.")
    password: SecretStr | None = Field(default=None, description='Password; write "${REDIS_PASSWORD}".')
    sentinel_username: SecretStr | None = Field(default=None, description="User at the sentinels.")
    sentinel_password: SecretStr | None = Field(default=None, description="Password at the sentinels.")
    tls: bool = Field(default=False, description="Encrypt connections; a rediss:// URL sets it.")
    tls_ca: FilePath | None = Field(default=None, description="File of CA certificates; by default the system's.")
    tls_cert: FilePath | None = Field(default=None, description="File of the client's certificate.")
    tls_key: FilePath | None = Field(default=None, description="File of the client's private key.")
    tls_key_password: SecretStr | None = Field(default=None, description="Password of the private key.")
    tls_verify: bool = Field(default=True, description="Check the server's certificate and host name.")
    connections: Count = Field(
        default=4, ge=1, le=64, description="Connections to each server for transfers; one more is for lookups."
    )
    pipeline: Bytes = Field(
        default=1 << 20,
        ge=1,
        le=1 << 30,
        description="Bytes that a connection may have asked for and not received; two blocks always.",
    )
    ttl: Seconds | None = Field(
        default=None, ge=0.001, le=10 * 365 * 86400, description="How long a block lives after it was stored."
    )
    timeout: Seconds = Field(
        default=5.0, gt=0, le=3600, description="How long one transfer of at most 8 MiB (or one block) may take."
    )
    connect_timeout: Seconds = Field(
        default=1.0,
        gt=0,
        le=60,
        description="How long a connection may take to open, and a cluster's server be silent in a transfer.",
    )
    allocator: str | None = Field(
        default=None,
        pattern=f"^({KNOWN.pattern})$",
        description="The server's `mem_allocator`, such as libc: for `tiered-kv simulate`, which asks no server.",
    )

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The configured servers; the server of `url` or `host` is the first. Empty with a Unix socket."""
        first = () if self.host is None else (Address(self.host, self.port),)
        return first + tuple(map(_parse_address, self.nodes))

    @property
    def silence_s(self) -> float:
        """How long a server may neither send nor take a byte before its blocks fail and it counts as down, in seconds.

        Of several servers, the other ones must not wait for it until the end of a transfer.
        """
        return self.connect_timeout if self.mode == "cluster" else math.inf

    def takes(self, block_bytes: int) -> tuple[Take, ...]:
        sockets = (self.connections + 1) * max(1, len(self.addresses))
        return (Take("descriptors", sockets, "connections"), Take("threads", self.connections + 2, "connections"))

    @field_validator("username", "password", "sentinel_username", "sentinel_password", "tls_key_password")
    @classmethod
    def _check_credential(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and stray_character(secret.get_secret_value(), may_have_blanks=True):
            raise ValueError(f"{STRAY_CHARACTER} at an end, such as a line's end: remove it")
        return secret

    @model_validator(mode="before")
    @classmethod
    def _take_url_apart(cls, data: object) -> object:
        if not isinstance(data, Mapping) or not isinstance(data.get("url"), str):
            return data
        parts = _parts_of(data["url"])
        for name in parts:
            if data.get(name) not in (None, False):
                raise ValueError(f"'url' and '{name}' both say it; give one of them")
        return {**data, **parts, "url": _without_userinfo(data["url"])}

    @model_validator(mode="after")
    def _is_consistent(self) -> RedisSettings:
        """Refuse URLs where a part is expected, and settings that contradict each other. No message repeats a value
        that may be a secret."""
        if self.host is not None and not _HOST.fullmatch(self.host):
            raise ValueError("'host' is a name or an address, without port, user or password; a URL belongs in 'url'")
        if self.socket is not None and "://" in self.socket:
            raise ValueError("'socket' is a path; a URL belongs in 'url'")
        for number, node in enumerate(self.nodes):
            try:
                _parse_address(node)
            except ValueError as error:
                raise ValueError(f"'nodes.{number}': {error}") from None
        is_single, is_socket = self.mode == "standalone", self.socket is not None
        problems = {
            "a Unix socket has no 'host', 'nodes' or 'tls'": is_socket and (self.host or self.nodes or self.tls),
            f"mode '{self.mode}' needs servers on the network, not a Unix socket": is_socket and not is_single,
            f"expected 'url' ({_URL_ACCEPTED}), or 'host', or 'socket'": is_single and (not self.host) != is_socket,
            "'nodes' is for mode 'cluster' or 'sentinel'": is_single and self.nodes,
            f"mode '{self.mode}' needs 'nodes' or 'url'": not (is_single or self.addresses),
            "'service' and mode 'sentinel' belong together": (self.mode == "sentinel") != (self.service is not None),
            "a cluster has no database but 0": self.mode == "cluster" and self.db,
            "'tls_key' without 'tls_cert'": self.tls_key and not self.tls_cert,
            "'tls_key_password' without 'tls_key'": self.tls_key_password and not self.tls_key,
            "'tls_ca', 'tls_cert' and 'tls_key' need 'tls: true' or a rediss:// URL": not self.tls
            and (self.tls_ca or self.tls_cert or self.tls_key),
        }
        for problem, exists in problems.items():
            if exists:
                raise ValueError(problem)
        return self


def _parts_of(url: str) -> dict[str, object]:
    """Return the settings that a URL stands for. The messages repeat nothing of it: it may have a password."""
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        raise ValueError(f"'url' cannot be read: expected {_URL_ACCEPTED}") from None
    if split.query or split.fragment:
        raise ValueError("'url' may not have a query: give its settings as keys of their own")
    parts: dict[str, object] = {
        "username": SecretStr(unquote(split.username)) if split.username else None,
        "password": SecretStr(unquote(split.password)) if split.password else None,
    }
    if split.scheme == "unix":
        parts["socket"] = unquote(split.path)
    elif split.scheme in ("redis", "rediss") and split.hostname:
        database = split.path.strip("/") or "0"
        if not database.isdecimal():
            raise ValueError("the path of 'url' is the number of a database, such as /0")
        tls = split.scheme == "rediss" or None
        parts |= {"host": unquote(split.hostname), "port": port, "db": int(database) or None, "tls": tls}
    else:
        raise ValueError(f"'url' names no server: expected {_URL_ACCEPTED}")
    return {name: value for name, value in parts.items() if value is not None}


def _without_userinfo(url: str) -> str:
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
