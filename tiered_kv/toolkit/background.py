"""A small piece of work that is done soon, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundTask:
    """Runs an action soon after a request, once for all requests before it begins; its exceptions are logged only.

    The thread, called `name`, lives for the task only, so an action that hangs blocks nothing else. There is never more
    than one. If no thread can be started, the action is not run: its owner must have another way to run it.
    """

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._action = action
        self._name = name
        self._lock = threading.Lock()  # guards the two below; held for assignments, and while a thread is started
        self._is_asked = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Run the action once more from its beginning, if a thread can be started. Does not wait; any thread."""
        with self._lock:
            self._is_asked = True
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._thread.start()
            except (RuntimeError, MemoryError):  # no thread available
                self._thread = None

    def join(self, timeout_s: float) -> bool:
        """Wait until nothing runs any more; return whether that is so."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        try:
            while self._goes_on():
                try:
                    self._action()
                except BaseException:  # SystemExit too: later requests would not run
                    logger.exception("%s failed", self._name)
        except BaseException:  # of a foreign log handler
            with self._lock:
                self._thread = None
            raise

    def _goes_on(self) -> bool:
        with self._lock:
            if not self._is_asked:
                self._thread = None
            is_asked, self._is_asked = self._is_asked, False
            return is_asked
