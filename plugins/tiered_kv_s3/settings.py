"""The YAML entry of an s3 tier.

`config.stack_config` reads it on the thread that opens a stack. Importing it does not import boto3.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.config.secrets import STRAY_CHARACTER, stray_character
from tiered_kv.config.units import FilePath, Seconds
from tiered_kv.toolkit.objects.settings import ObjectSettings, checked_endpoint


class S3Settings(ObjectSettings):
    """Settings of the tier that keeps blocks in a bucket."""

    type: str = "s3"
    bucket: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,62}$", examples=["kv-blocks"], description="The bucket. It must exist."
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
    request_timeout: Seconds = Field(
        default=5.0,
        gt=0,
        le=300,
        description="How long a connection may take to open, or go without a byte, before the request is repeated.",
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

    @field_validator("access_key_id", "secret_access_key", "session_token")
    @classmethod
    def _check_credential(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and stray_character(secret.get_secret_value()):
            raise ValueError(f"{STRAY_CHARACTER}, such as a line's end: remove it")
        return secret

    @field_validator("endpoint_url")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        return None if url is None else checked_endpoint(url)

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
