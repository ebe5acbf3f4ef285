"""A background task: short work on a thread that lives as long as the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from tiered_kv.errors import ResourceError
from tiered_kv.threads import start_thread

logger = logging.getLogger(__name__)


class BackgroundTask:
    """Runs an action soon after a request; one run serves all requests before it. Exceptions are logged only.

    There is at most one thread, called `name`, which ends with the action: an action that hangs blocks nothing else. If
    no thread can be started, the action is not run, and its owner must have another way to run it.
    """

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._action = action
        self._name = name
        self._lock = threading.Lock()  # guards the two below; held for assignments and the start of a thread
        self._is_asked = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Run the action once more from its beginning, if a thread can be started. Does not wait. Any thread."""
        with self._lock:
            self._is_asked = True
            if self._thread is not None:
                return
            with suppress(ResourceError):
                self._thread = start_thread(self._run, self._name)

    def join(self, timeout_s: float) -> bool:
        """Wait until nothing runs; return whether that is so."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while self._take_request():
            try:
                self._action()
            except BaseException:  # SystemExit too: later requests would not run
                with suppress(Exception):  # of a log handler
                    logger.exception("%s failed", self._name)

    def _take_request(self) -> bool:
        with self._lock:
            is_asked, self._is_asked = self._is_asked, False
            if not is_asked:
                self._thread = None
            return is_asked
