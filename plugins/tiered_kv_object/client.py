"""The connection to a bucket by obstore: requests that end by their deadlines, and credentials that are read again.

The store and the control of a tier, and its administration, share one client, on any thread. These things stay true:

- No call outlives its deadline. obstore ends a blocking call after `request_timeout` only. So with less time left, a
  coroutine makes the request, and is cancelled at the deadline (`loop`). It takes more of the processor. A coroutine
  makes every request of an identity whose tokens come from a server: while that is silent, blocking calls wait for each
  other.
- obstore repeats no request: `Retries` does, with the tier's deadlines.
- obstore's threads do not survive a fork. A process that inherits them gets an error. If other code of the process
  used obstore before the fork, requests end by their deadlines: none blocks before a coroutine has got an answer. Nor
  does a client block in a process that inherits it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from obstore.store import AzureStore, GCSStore

from tiered_kv.config.secrets import foreign_text
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import Counters
from tiered_kv.toolkit.objects.failures import RequestFailures
from tiered_kv.toolkit.objects.metrics import OBJECT_METRICS
from tiered_kv.toolkit.objects.retries import Retries
from tiered_kv.toolkit.objects.verdict import BucketError, Verdict
from tiered_kv_object.answers import NO_TOKEN_IN_TIME, has_answer, sentence, verdict_of, words_of
from tiered_kv_object.identity import asks_for_tokens, identity_of, rival_of
from tiered_kv_object.loop import run_within
from tiered_kv_object.settings import AzureSettings, GcsSettings, ObstoreSettings

if TYPE_CHECKING:  # obstore has these names for type checkers only
    from obstore.store import AzureConfig, GCSConfig

T = TypeVar("T")
Store = Any  # GCSStore or AzureStore: obstore's functions take both, and mypy knows no common class of theirs

REOPEN_S: Final = 5.0
"""The pause between two openings that read refused credentials again; each opening doubles it."""
REOPEN_MAX_S: Final = 60.0
_IDLE_S: Final = 15.0  # how long a connection may be idle and is used again
_MARGIN_S: Final = 0.25  # obstore's timeout ends a call a little late

_log = logging.getLogger("tiered_kv.object")
_process = 0  # the one whose threads obstore started


@dataclass(slots=True)
class Opened:
    """A store of obstore, with the credentials of its time.

    Requests get this object, and not the store, so that no frame of an exception keeps the store and its connections.
    """

    store: Store
    """None after `ObjectClient.close`."""
    identity: str


class ObjectClient:
    """A bucket, and the requests for it. Raises `ConfigError`: obstore refuses the settings."""

    def __init__(self, settings: ObstoreSettings, tier: str) -> None:
        global _process
        if _process not in (0, os.getpid()):
            raise ConfigError("obstore was used before this process was forked; open the stack after it")
        _process = os.getpid()
        self.settings = settings
        self.tier = tier
        self.skew_s = 0.0
        """How far this machine's clock is ahead of the server's, to a second or so; as of the last sweep."""
        self.heard_s = float("-inf")  # when the server last refused a request, by `time.monotonic()`
        self._secrets = settings.secret_texts()
        self._kind = "gcs" if isinstance(settings, GcsSettings) else "azure"
        self._asks_for_tokens = asks_for_tokens(settings)
        self._lock = threading.Lock()  # guards the three below
        self._opened = self._open()
        self._reopened_s, self._reopen_pause_s = float("-inf"), REOPEN_S
        self._is_running = False  # whether obstore's threads have ended a request of this process
        self.failures = RequestFailures(tier, Counters(OBJECT_METRICS), self.sentence, _log)
        self.retries = Retries(settings.attempts, self.failures)

    @property
    def identity(self) -> str:
        """Whose credentials the requests have, in words."""
        return self._opened.identity

    @property
    def url(self) -> str:
        """The bucket's, for messages."""
        where = f" at {self.settings.endpoint}" if self.settings.endpoint else ""
        return f"{self.settings.place}{where}"

    def request(
        self,
        blocking: Callable[[Opened], Verdict] | None,
        coroutine: Callable[[Opened], Coroutine[Any, Any, Verdict]],
        deadline: float,
    ) -> Verdict:
        """Make one attempt of a request, by `blocking` if there is the time for it."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return Verdict.TIMEOUT
        if self.retries.closing.is_set():
            return Verdict.UNASKED
        opened = self._opened
        try:
            has_time = left_s > self.settings.request_timeout + _MARGIN_S
            may_block = has_time and self._is_running and not self._asks_for_tokens and os.getpid() == _process
            if blocking is not None and may_block:
                return blocking(opened)
            verdict = run_within(coroutine(opened), min(left_s, self.settings.request_timeout))
            self._is_running |= verdict is not Verdict.TIMEOUT
            return verdict
        except TimeoutError:
            return Verdict.TIMEOUT
        except Exception as error:  # obstore's, which have no common class
            return Verdict.UNASKED if opened.store is None else self.verdict_on(error, opened)

    def verdict_on(self, error: Exception, opened: Opened) -> Verdict:
        """Return the verdict on obstore's error; CREDENTIALS if the credentials were read again since."""
        verdict, words = verdict_of(error), words_of(error)
        self.retries.words[verdict] = words
        if has_answer(error):
            self.heard_s, self._is_running = time.monotonic(), True
        if verdict in (Verdict.DENIED, Verdict.CREDENTIALS_EXPIRED) and self._reopen(opened):
            return Verdict.CREDENTIALS
        return verdict

    def call(self, operation: str, coroutine: Callable[[Opened], Coroutine[Any, Any, T]], deadline: float) -> T | None:
        """Return the result of a request in the background; None if the object is missing.

        Raises `BucketError`: it failed in all attempts.
        """
        results: list[T] = []

        async def run(opened: Opened) -> Verdict:
            results.append(await coroutine(opened))
            return Verdict.DONE

        verdict = self.retries.run(operation, lambda: self.request(None, run, deadline), deadline)
        if verdict is Verdict.ABSENT:
            return None
        if verdict is not Verdict.DONE:
            raise self.error(operation, verdict)
        return results[-1]

    def error(self, operation: str, reason: str, words: str = "") -> BucketError:
        verdict = reason if isinstance(reason, Verdict) else None
        said = self.sentence(reason, words or (self.retries.words.get(verdict, "") if verdict else ""), operation)
        return BucketError(said, reason, tier=self.tier, operation=operation)

    def sentence(self, reason: str, words: str, operation: str = "") -> str:
        """Return the fault of the bucket, and the remedy; without the secrets that a server may repeat."""
        shown, identity = foreign_text(words, self._secrets), self._opened.identity
        if reason == Verdict.TIMEOUT and self._asks_for_tokens:
            shown = f"{NO_TOKEN_IN_TIME} to {identity}"
        return sentence(self._kind, self.url, identity, reason, shown, operation)

    def age_s(self, meta: Any) -> float:  # Any: obstore's dictionary
        """Return an object's age by the server's clock, as far as its difference is known."""
        return max(0.0, time.time() - self.skew_s - float(meta["last_modified"].timestamp()))

    def close(self) -> None:
        """Begin no request, make no second attempt, and close idle connections; a request in flight goes on."""
        self.retries.closing.set()
        with self._lock:
            self._opened.store = None

    def _reopen(self, refused: Opened) -> bool:
        """Read the credentials again because the server refuses these, if that is due; return whether it was done."""
        with self._lock:
            if self.retries.closing.is_set():
                return False
            if self._opened is not refused:
                return True  # by another thread
            now_s = time.monotonic()
            if now_s - self._reopened_s < self._reopen_pause_s:
                return False
            if now_s - self._reopened_s > 2 * REOPEN_MAX_S:
                self._reopen_pause_s = REOPEN_S
            else:
                self._reopen_pause_s = min(2 * self._reopen_pause_s, REOPEN_MAX_S)
            self._reopened_s = now_s
            try:
                self._opened = self._open()
            except ConfigError:  # a file may be half written
                return False
            return True

    def _open(self) -> Opened:
        settings = self.settings
        timeout = timedelta(seconds=settings.request_timeout)
        options: dict[str, Any] = {
            "timeout": timeout,
            "connect_timeout": timeout,
            "pool_idle_timeout": timedelta(seconds=_IDLE_S),
            "allow_http": (settings.endpoint or "").startswith("http:"),
            "user_agent": "tiered-kv",
            "default_content_type": "application/octet-stream",
        }
        retries: Any = {"max_retries": 0, "retry_timeout": timeout}
        if (rival := rival_of(settings)) is not None:
            setting, variable = rival
            used = f"obstore would not use the setting '{setting}', but the variable {variable}"
            raise ConfigError(f"{used}: unset it, or leave the setting out")
        try:
            if settings.ca_file is not None:
                options["root_certificate"] = Path(settings.ca_file).read_bytes()
            given = {"client_options": options, "retry_config": retries}
            if isinstance(settings, GcsSettings):
                store = _open_gcs(settings, given)
            else:
                assert isinstance(settings, AzureSettings)
                store = _open_azure(settings, given)
        except OSError as error:
            raise ConfigError(f"no certificates can be read: {error.strerror}", location="ca_file") from None
        except Exception as error:  # obstore's, which have no common class; the text may quote a key
            said = foreign_text(str(error).partition("\n\nDebug")[0], self._secrets)
            raise ConfigError(f"obstore refuses {identity_of(settings)}: {said}") from None
        return Opened(store, identity_of(settings))


def _open_gcs(settings: GcsSettings, given: Mapping[str, Any]) -> Store:
    config: GCSConfig = {}
    if settings.endpoint is not None:
        config["base_url"] = settings.endpoint
    if settings.service_account_file is not None:
        config["service_account"] = settings.service_account_file
    if settings.access_token is not None:
        config["bearer_token"] = settings.access_token.get_secret_value()
    return GCSStore(settings.bucket, config=config, **given)


def _open_azure(settings: AzureSettings, given: Mapping[str, Any]) -> Store:
    # Given, or else variables of the environment with these names would count.
    config: AzureConfig = {"account_name": settings.account, "use_emulator": False}
    if settings.endpoint is not None:
        config["endpoint"] = settings.endpoint
    if settings.account_key is not None:
        config["account_key"] = settings.account_key.get_secret_value()
        config["skip_signature"] = False
    if settings.sas_token is not None:
        config["sas_key"] = settings.sas_token.get_secret_value()
        config["skip_signature"] = False
    return AzureStore(settings.container, config=config, **given)
