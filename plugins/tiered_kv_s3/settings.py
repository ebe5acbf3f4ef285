"""The YAML entry of an s3 tier, and its needs of the process and the machine.

`config.stack_config` reads it on the thread that opens a stack. Importing it does not import boto3.
"""

from __future__ import annotations

from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.config.secrets import STRAY_CHARACTER, stray_character
from tiered_kv.config.units import Bytes, Count, FilePath, Seconds
from tiered_kv.system.limits import Take
from tiered_kv.toolkit.codecs import CodecSettings

HEADS_IN_FLIGHT_MAX: Final = 16
"""Connections over which one batch of HEAD requests travels, besides those for transfers."""


class S3Settings(CodecSettings):
    """Settings of the tier that keeps blocks in a bucket."""

    type: str = "s3"
    bucket: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,62}$", examples=["kv-blocks"], description="The bucket. It must exist."
    )
    prefix: str = Field(
        default="tiered-kv",
        max_length=512,
        pattern=r"^[A-Za-z0-9!_.'()-]+(/[A-Za-z0-9!_.'()-]+)*$",
        examples=["kv/blocks"],
        description="What every object's name begins with; one or more words between slashes.",
    )
    endpoint_url: str | None = Field(
        default=None, description="The server, as http(s)://HOST:PORT; by default AWS, by region."
    )
    region: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9-]{1,64}$",
        examples=["eu-central-1"],
        description="The bucket's region; by default that of the environment or profile, else us-east-1.",
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto", description="Whether requests name the bucket in the path or in the host's name."
    )
    profile: str | None = Field(default=None, min_length=1, description="A profile of the AWS configuration files.")
    access_key_id: SecretStr | None = Field(
        default=None, description="Explicit credentials; by default those of boto3's chain of providers."
    )
    secret_access_key: SecretStr | None = Field(default=None, description="Goes with access_key_id.")
    session_token: SecretStr | None = Field(default=None, description="Of temporary explicit credentials.")
    ca_file: FilePath | None = Field(
        default=None, description="PEM file of the authorities that may sign the server's certificate."
    )
    connections: Count = Field(default=16, ge=2, le=256, description="Blocks in flight, each on one connection.")
    request_timeout: Seconds = Field(
        default=5.0,
        gt=0,
        le=300,
        description="How long a connection may take to open, or go without a byte, before the request is repeated.",
    )
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
    storage_class: str | None = Field(
        default=None,
        pattern=r"^[A-Z_]{1,64}$",
        examples=["ONEZONE_IA"],
        description="The storage class of new objects, such as ONEZONE_IA.",
    )
    server_encryption: Literal["AES256", "aws:kms"] | None = Field(
        default=None, description="How the server encrypts new objects; by default as the bucket's settings say."
    )
    kms_key_id: str | None = Field(
        default=None,
        pattern=r"^[!-~]{1,2048}$",
        description="The key for server_encryption by aws:kms; by default AWS's own.",
    )
    sign_payload: bool = Field(
        default=False, description="Hash every body into its signature, for buckets whose policy demands it."
    )

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        if {".", ".."} & set(prefix.split("/")):
            raise ValueError("expected no '.' and no '..' between slashes: servers remove them from a path")
        return prefix

    @field_validator("access_key_id", "secret_access_key", "session_token")
    @classmethod
    def _check_credential(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and stray_character(secret.get_secret_value()):
            raise ValueError(f"{STRAY_CHARACTER}, such as a line's end: remove it")
        return secret

    @field_validator("endpoint_url")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        if url is None:
            return None
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

    def takes(self, block_bytes: int) -> tuple[Take, ...]:
        sockets = self.connections + HEADS_IN_FLIGHT_MAX
        return (Take("descriptors", sockets, "connections"), Take("threads", sockets + 2, "connections"))

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key")
        if self.profile is not None and self.access_key_id is not None:
            raise ValueError("give either a profile or access_key_id, not both")
        if self.kms_key_id is not None and self.server_encryption != "aws:kms":
            raise ValueError("kms_key_id needs 'server_encryption: aws:kms'")
        return self
