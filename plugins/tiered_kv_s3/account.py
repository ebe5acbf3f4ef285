"""Who we are to the server, and where its bucket is; boto3 knows both."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv_s3.endpoint import Endpoint
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.signer import Credentials

DEFAULT_REGION = "us-east-1"
RENEW_PAUSE_S = 5.0
"""How long after one attempt to get fresh credentials the next one is made."""

_CLIENT_CONNECTIONS = 4
_CLIENT_ATTEMPTS = 3
_LOGGERS_OF_REQUESTS = ("auth", "endpoint", "hooks", "httpsession", "parsers", "retryhandler", "awsrequest", "client")


class Account:
    """A boto3 session with its credentials, and a client for what is not on the hot path. Any thread may call.

    Args:
        settings: The tier's YAML entry.
        tier: The tier's name, for messages.

    Raises:
        ConfigError: boto3 cannot work with the settings.
    """

    def __init__(self, settings: S3Settings, tier: str) -> None:
        self._settings = settings
        self._tier = tier
        self._lock = threading.Lock()  # guards the session's credentials while they are renewed
        self._renewed_s = -RENEW_PAUSE_S
        _silence_request_logs()
        try:
            self._session: Any = self._open_session()  # Any: boto3 makes its classes when they are asked for
            self.region: str = settings.region or self._session.region_name or DEFAULT_REGION
            self.client = self._make_client(self.region)
        except _library_errors() as error:
            raise ConfigError(f"tier '{tier}': boto3 refuses the settings: {type(error).__name__}") from None

    def credentials(self) -> Credentials:
        """Return what to sign with now; those of a role or a process are refreshed in time.

        Raises:
            TierUnavailableError: There are none.
        """
        try:
            provider = self._session.get_credentials()
            frozen = provider.get_frozen_credentials() if provider is not None else None
        except _library_errors() as error:
            raise self._error(f"credentials cannot be had: {type(error).__name__}", "sign") from None
        if frozen is None or not frozen.access_key:
            raise self._error("there are no credentials; see boto3's chain of providers, or set access_key_id", "sign")
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    def renew(self, stale: Credentials) -> bool:
        """Look for credentials anew, since the server takes `stale` for expired; return whether there are others."""
        if self._settings.access_key_id is not None:
            return False
        with self._lock:
            try:
                return self.credentials() != stale or (self._reopen_session() and self.credentials() != stale)
            except TierUnavailableError:
                return False

    def endpoint(self, region: str) -> Endpoint:
        """Return where the bucket is, if it is in `region`: what boto3 makes of the settings."""
        from botocore import UNSIGNED

        client = self._make_client(region, signature_version=UNSIGNED)
        try:
            url = client.generate_presigned_url("get_object", Params={"Bucket": self._settings.bucket, "Key": "x"})
        except _library_errors() as error:
            raise ConfigError(f"tier '{self._tier}': boto3 finds no endpoint: {type(error).__name__}") from None
        finally:
            client.close()
        return Endpoint.of_url(url)

    def move(self, region: str) -> None:
        """Use the bucket in `region` from now on."""
        with self._lock:
            self.region = region
            self._replace_client()

    def close(self) -> None:
        self.client.close()

    def _open_session(self) -> Any:
        import boto3

        settings = self._settings
        secrets = {
            "aws_access_key_id": settings.access_key_id,
            "aws_secret_access_key": settings.secret_access_key,
            "aws_session_token": settings.session_token,
        }
        given: dict[str, Any] = {
            name: secret.get_secret_value() for name, secret in secrets.items() if secret is not None
        }
        return boto3.session.Session(profile_name=settings.profile, **given)

    def _reopen_session(self) -> bool:
        """Have files and environment read again, if that was not just done; under the lock."""
        if time.monotonic() - self._renewed_s < RENEW_PAUSE_S:
            return False
        self._renewed_s = time.monotonic()
        try:
            self._session = self._open_session()
            self._replace_client()
        except _library_errors():
            return False
        return True

    def _replace_client(self) -> None:
        replaced, self.client = self.client, self._make_client(self.region)
        replaced.close()

    def _make_client(self, region: str, **options: Any) -> Any:
        from botocore.config import Config

        settings = self._settings
        config = Config(
            connect_timeout=settings.request_timeout,
            read_timeout=settings.request_timeout,
            retries={"max_attempts": min(_CLIENT_ATTEMPTS, settings.attempts) - 1, "mode": "standard"},
            max_pool_connections=_CLIENT_CONNECTIONS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": settings.addressing, "us_east_1_regional_endpoint": "regional"},
            **{"signature_version": "s3v4", **options},
        )
        return self._session.client(
            "s3",
            region_name=region,
            endpoint_url=settings.endpoint_url,
            verify=settings.ca_file or True,
            config=config,
        )

    def _error(self, message: str, operation: str) -> TierUnavailableError:
        return TierUnavailableError(message, tier=self._tier, operation=operation)


def _library_errors() -> tuple[type[Exception], ...]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError, Boto3Error, ValueError)


def _silence_request_logs() -> None:
    """Keep botocore from writing whole requests, session tokens included, into a log of level DEBUG."""
    for name in _LOGGERS_OF_REQUESTS:
        logger = logging.getLogger(f"botocore.{name}")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
