"""The YAML entries of the tiers gcs and azure.

`config.stack_config` reads them on the thread that opens a stack. Importing it does not import obstore.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.config.secrets import STRAY_CHARACTER, stray_character
from tiered_kv.config.units import FilePath, Seconds
from tiered_kv.toolkit.objects.settings import ObjectSettings, checked_endpoint


class ObstoreSettings(ObjectSettings):
    """What both tiers have."""

    endpoint: str | None = Field(
        default=None, description="The server, as http(s)://HOST:PORT; by default the cloud's own."
    )
    ca_file: FilePath | None = Field(
        default=None, description="PEM file of authorities that may sign the server's certificate, beside the system's."
    )
    request_timeout: Seconds = Field(
        default=5.0, gt=0, le=300, description="How long a request may take, before it is tried again."
    )

    @property
    @abstractmethod
    def place(self) -> str:
        """The bucket or container, as its users name it."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        return None if url is None else checked_endpoint(url).rstrip("/")


def _unspoiled(secret: SecretStr | None) -> SecretStr | None:
    if secret is not None and stray_character(secret.get_secret_value()):
        raise ValueError(f"{STRAY_CHARACTER}, such as a line's end: remove it")
    return secret


class GcsSettings(ObstoreSettings):
    """Settings of the tier that keeps blocks in a bucket of Google Cloud Storage."""

    type: str = "gcs"
    bucket: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$",
        examples=["kv-blocks"],
        description="The bucket. It must exist.",
    )
    service_account_file: FilePath | None = Field(
        default=None, description="JSON key of a service account; by default Google's application default credentials."
    )
    access_token: SecretStr | None = Field(
        default=None, description="A token that is sent as it is, and not renewed: for emulators and proxies."
    )

    @property
    def place(self) -> str:
        return f"gs://{self.bucket}"

    _check_token = field_validator("access_token")(_unspoiled)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.service_account_file is not None and self.access_token is not None:
            raise ValueError("give either service_account_file or access_token, not both")
        return self


class AzureSettings(ObstoreSettings):
    """Settings of the tier that keeps blocks in a container of Azure Blob Storage."""

    type: str = "azure"
    account: str = Field(pattern=r"^[a-z0-9]{3,24}$", examples=["mystore"], description="The storage account's name.")
    container: str = Field(
        pattern=r"^[a-z0-9](-?[a-z0-9]){2,62}$", examples=["kv-blocks"], description="The container. It must exist."
    )
    account_key: SecretStr | None = Field(
        default=None, description="A key of the account; by default an identity of the machine or the environment."
    )
    sas_token: SecretStr | None = Field(default=None, description="A shared access signature, in place of a key.")

    @property
    def place(self) -> str:
        return f"azure://{self.account}/{self.container}"

    _check_secrets = field_validator("account_key", "sas_token")(_unspoiled)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.account_key is not None and self.sas_token is not None:
            raise ValueError("give either account_key or sas_token, not both")
        return self
