"""The settings that all object tiers have, and their needs of the process and the machine.

A tier's settings subclass `ObjectSettings`; `config.stack_config` reads them on the thread that opens a stack.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from tiered_kv.config.units import Bytes, Count, Seconds
from tiered_kv.system.limits import Take
from tiered_kv.toolkit.codecs import CodecSettings

HEADS_IN_FLIGHT_MAX: Final = 16
"""Requests for presence that one batch of lookups has in flight, besides those for transfers."""


class ObjectSettings(CodecSettings):
    """Settings of a tier that keeps blocks as objects in a bucket."""

    prefix: str = Field(
        default="tiered-kv",
        max_length=512,
        pattern=r"^[A-Za-z0-9!_.'()-]+(/[A-Za-z0-9!_.'()-]+)*$",
        examples=["kv/blocks"],
        description="What every object's name begins with; one or more words between slashes.",
    )
    connections: Count = Field(default=16, ge=2, le=256, description="Blocks in flight, each on one connection.")
    attempts: Count = Field(default=5, ge=1, le=100, description="How often a request is tried.")
    presence_ttl: Seconds = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="How long the tier keeps the bucket's answer that a block exists or does not.",
    )
    ttl: Seconds | None = Field(
        default=None, gt=0, description="Older blocks are misses, and a sweep deletes them; by default no limit."
    )
    capacity: Bytes | None = Field(
        default=None,
        ge=1,
        description="A sweep deletes this namespace's oldest blocks beyond so many bytes; by default no limit.",
    )
    sweep_interval: Seconds = Field(
        default=60.0, gt=0, le=86400, description="How often the bucket is listed to keep ttl and capacity."
    )

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        if {".", ".."} & set(prefix.split("/")):
            raise ValueError("expected no '.' and no '..' between slashes: servers remove them from a path")
        return prefix

    def takes(self, block_bytes: int) -> tuple[Take, ...]:
        sockets = self.connections + HEADS_IN_FLIGHT_MAX
        return (Take("descriptors", sockets, "connections"), Take("threads", sockets + 2, "connections"))


def checked_endpoint(url: str) -> str:
    """Return the URL of a server as it was given; ValueError, in words for its user, if it is no such URL."""
    try:
        parts = urlsplit(url)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_good:
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("expected a URL without user, query and fragment; credentials have settings of their own")
    return url
