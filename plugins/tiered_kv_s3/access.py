"""Access to a bucket: the boto3 session with its credentials, the bucket's endpoint, and sentences for failures.

The tier, its `Bucket`, its `Control` and the administration share one object, on any thread. These things stay true:

- No lock is held while a provider of credentials runs, and a request waits for one until its deadline at most.
- No message repeats a secret: neither a setting, nor credentials that were used before.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from tiered_kv.config.secrets import STRAY_CHARACTER, foreign_text, stray_character
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.metrics.counters import Counters
from tiered_kv.system.threads import BackgroundTask
from tiered_kv.toolkit.objects.failures import RequestFailures
from tiered_kv_s3.connection import Credentials, Endpoint
from tiered_kv_s3.metrics import METRICS
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import sentence

DEFAULT_REGION = "us-east-1"
REFRESH_S = 60.0
"""Seconds between two calls of the provider. boto3's providers replace credentials some minutes before their end."""
RENEW_PAUSE_S = 5.0
"""The pause between two attempts to get new credentials. An attempt that gets the same ones doubles the next pause."""
RENEW_PAUSE_MAX_S = 60.0
RENEW_WAIT_S = 2.0
"""How long a request waits for other credentials, if its own may be right and lack only a permission."""

_log = logging.getLogger("tiered_kv.s3")
_LOGGERS_OF_REQUESTS = ("auth", "endpoint", "hooks", "httpsession", "parsers", "retryhandler", "awsrequest", "client")
"""Loggers of botocore that log whole requests, with session tokens, at level DEBUG."""


class BucketAccess:
    """A boto3 session, its credentials, and sentences for failures. Any thread may call.

    A provider of credentials may use a server or a program that hangs, and boto3 sets no limit. So a background thread
    calls the provider. A request waits for it only if there are no credentials yet, and until its deadline.
    Raises `ConfigError`: boto3 cannot work with the settings.
    """

    def __init__(self, settings: S3Settings, tier: str) -> None:
        self._settings = settings
        self._tier = tier
        self._making_client = threading.Lock()
        self._explicit: Credentials | None = None
        if settings.access_key_id is not None and settings.secret_access_key is not None:
            secrets = (settings.access_key_id, settings.secret_access_key, settings.session_token)
            self._explicit = Credentials(*(each.get_secret_value() if each else "" for each in secrets))
        self._secrets = settings.secret_texts()
        self.failures = RequestFailures(tier, Counters(METRICS), self.sentence, _log)
        self.url = f"{settings.endpoint_url or 's3:/'}/{settings.bucket}"  # the bucket's, for messages
        # Guards the credentials, `_problem`, `_asked_s`, `_renewed_s`, and changes of `_session` and `_asking`.
        self._lock = threading.Lock()  # never held while a provider runs
        self._current: Credentials | None = None
        self._used: deque[Credentials] = deque(maxlen=8)  # the last ones: servers' texts may repeat them
        self._renew_pause_s = RENEW_PAUSE_S
        self._problem = "no thread can be started that asks for credentials"  # why there are no credentials
        self._asked_s = self._renewed_s = -math.inf  # the last call of the provider, and the last `renew`
        for part in _LOGGERS_OF_REQUESTS:
            logger = logging.getLogger(f"botocore.{part}")
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)
        try:
            self._session: Any = self._open_session()  # Any: boto3 makes its classes at run time
            self.region: str = settings.region or self._session.region_name or DEFAULT_REGION
        except library_errors() as error:
            raise ConfigError(f"boto3 refuses the settings: {type(error).__name__}") from None
        self._asking = self._provider_of(self._session)

    def credentials(self, deadline: float) -> Credentials:
        """Return the current credentials; a role's or a process's are refreshed before they expire.

        Raises `TierUnavailableError`: there are none by the deadline.
        """
        if self._explicit is not None:
            return self._explicit
        with self._lock:
            pause_s = RENEW_PAUSE_S if self._current is None else REFRESH_S
            if time.monotonic() - self._asked_s >= pause_s:
                self._asking.ask()
            if self._current is not None:
                return self._current
            asking = self._asking
        is_answered = asking.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if self._current is not None:
                return self._current
            message = self._problem if is_answered else "the provider of credentials did not answer in time"
        raise TierUnavailableError(message, tier=self._tier, operation="sign")

    def renew(self, stale: Credentials, deadline: float, *, are_expired: bool = True) -> bool:
        """Read the credentials again because the server refuses `stale`; return whether there are others.

        Without `are_expired`, `stale` stays in use until there are others: only a permission may be missing.
        """
        if self._explicit is not None:
            return False
        failures: tuple[type[Exception], ...] = (TierUnavailableError, *library_errors())
        try:
            with self._lock:
                is_due = time.monotonic() - self._renewed_s >= min(self._renew_pause_s, RENEW_PAUSE_MAX_S)
                if is_renewing := self._current == stale and is_due:
                    self._renewed_s = time.monotonic()
                    self._renew_pause_s = min(2 * self._renew_pause_s, RENEW_PAUSE_MAX_S)
                    self._session = self._open_session()  # reads files and environment again
                    self._asking = self._provider_of(self._session)  # the earlier one may hang
                    self._asked_s = -math.inf
                    if are_expired:
                        self._current = None
                asking = self._asking
            if is_renewing and not are_expired:
                asking.ask()
                asking.join(max(0.0, min(deadline - time.monotonic(), RENEW_WAIT_S)))
            is_other = self.credentials(deadline) != stale
        except failures:
            return False
        if is_renewing and is_other:
            self._renew_pause_s = RENEW_PAUSE_S
            _log.warning("tier '%s': the server refused the credentials; they were read again, and changed", self._tier)
        return is_other

    def sentence(self, reason: str, words: str, operation: str = "") -> str:
        """Return the fault of the bucket, and the remedy; without the secrets that a server may repeat."""
        with self._lock:
            used = [text for each in self._used for text in astuple(each)]
        shown = "" if "authorization" in words.lower() else foreign_text(words, self._secrets.union(used))
        return sentence(self.url, reason, shown, operation)

    def client(self, credentials: Credentials, timeout_s: float, attempts: int) -> Any:
        """Return boto3's client for the bucket's server. It tries each request `attempts` times at most."""
        return self._make_client(
            {
                "connect_timeout": timeout_s,
                "read_timeout": timeout_s,
                "retries": {"total_max_attempts": attempts, "mode": "standard"},
            },
            verify=self._settings.ca_file,
            aws_access_key_id=credentials.access_key_id,
            aws_secret_access_key=credentials.secret_access_key,
            aws_session_token=credentials.session_token or None,
        )

    def endpoint(self) -> Endpoint:
        """Return the bucket's endpoint, which boto3 derives from the settings."""
        from botocore import UNSIGNED

        try:
            client = self._make_client(
                {"signature_version": UNSIGNED},
                aws_access_key_id="none",  # with a key given, boto3 calls no provider
                aws_secret_access_key="none",
            )
            bucket = self._settings.bucket
            url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "x"})
            client.close()
        except library_errors() as error:
            raise ConfigError(f"boto3 finds no endpoint: {type(error).__name__}") from None
        try:
            return Endpoint.of_url(url)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _make_client(self, config: Mapping[str, Any], **arguments: Any) -> Any:
        from botocore.config import Config

        s3 = {"addressing_style": self._settings.addressing, "us_east_1_regional_endpoint": "regional"}
        with self._making_client:  # one thread at a time may use a session
            return self._session.client(
                "s3",
                region_name=self.region,
                endpoint_url=self._settings.endpoint_url,
                config=Config(s3=s3, **config),
                **arguments,
            )

    def _provider_of(self, session: Any) -> BackgroundTask:
        return BackgroundTask(lambda: self._ask(session), f"tiered-kv-{self._tier}-credentials")

    def _ask(self, session: Any) -> None:
        found: Credentials | None = None
        problem = "there are no credentials; see boto3's chain of providers, or set access_key_id"
        with self._lock:
            self._asked_s = time.monotonic()
        try:
            provider = session.get_credentials()
            frozen = provider.get_frozen_credentials() if provider is not None else None
            parts = () if frozen is None else (frozen.access_key, frozen.secret_key, frozen.token)
            if any(stray_character(part or "") for part in parts):
                problem = f"the credentials of the provider '{provider.method}' {STRAY_CHARACTER}; correct them there"
            elif frozen is not None and frozen.access_key:
                found = Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")
        except Exception as error:  # any exception of a provider; its text may contain secrets
            problem = f"the provider of credentials failed: {type(error).__name__}"
        with self._lock:
            if self._session is session:
                self._current, self._problem = found or self._current, problem
                if found is not None and found not in self._used:
                    self._used.append(found)

    def _open_session(self) -> Any:
        import boto3

        return boto3.session.Session(profile_name=self._settings.profile)


def library_errors() -> tuple[type[Exception], ...]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    return (BotoCoreError, ClientError, Boto3Error, ResponseParserError, ValueError)
