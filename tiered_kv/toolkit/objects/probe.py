"""The probe of a bucket that does not answer: a background thread asks it, so that no request's lookup waits for it.

`SILENT_AFTER` lookups in a row that get no answer start the probe. Until the probe has an answer, lookups fail at once.
A store or load is still sent: no request waits for a store, and blocks are loaded only after a lookup has found them.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Final

from tiered_kv.errors import TierUnavailableError
from tiered_kv.system.threads import BackgroundTask
from tiered_kv.toolkit.objects.store import ObjectStore
from tiered_kv.toolkit.objects.verdict import UNHEARD

SILENT_AFTER: Final = 3
"""Lookups without an answer in a row: one lost answer is no outage."""
PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 2.0


class BucketProbe:
    """Knows whether a bucket answers. Any thread may call.

    Args:
        name: Name of an object that need not exist.
        timeout_s: How long one request may take, as a lookup may.
    """

    def __init__(self, store: ObjectStore, name: str, timeout_s: float, thread_name: str) -> None:
        self._store = store
        self._name = name
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self.silences = 0  # lookups in a row without an answer; a race miscounts by one
        self._is_silent = False  # set by lookups, reset by the probe
        self._asking = BackgroundTask(self._ask, thread_name)

    def is_silent(self) -> bool:
        """Return whether the bucket does not answer. The probe runs meanwhile."""
        if self._is_silent:
            self._asking.ask()  # again, if the system gave no thread before
        return self._is_silent

    def note_silence(self) -> None:
        """Note that the bucket has answered no request of a lookup."""
        self.silences += 1
        if self.silences >= SILENT_AFTER and not self._over.is_set():
            self._is_silent = True
            self._asking.ask()

    def stop(self, timeout_s: float) -> None:
        """End the probe. Close the bucket before: a request in flight then fails."""
        self._over.set()
        self._asking.join(timeout_s)

    def _ask(self) -> None:
        pause_s = PAUSE_MIN_S
        while self._is_silent and not self._over.is_set():
            with suppress(TierUnavailableError):  # raised if there are no credentials
                asked_s = time.monotonic()
                (verdict,) = self._store.head_all([self._name], time.monotonic() + self._timeout_s)
                if verdict not in UNHEARD or self._store.heard_s >= asked_s:
                    self.silences, self._is_silent = 0, False
                    return
            self._over.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
