"""A small piece of work that is done soon, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Errand:
    """Runs an action soon after it is asked for, once for all who ask before it begins.

    The thread lives for the errand only, so that an action that hangs holds up nothing else, and there is never more
    than one. Where no thread is to be had, the action is not run: its owner has another way to come to it in the end.

    Args:
        action: What to do. What it raises ends the thread, as that of any thread; the next who asks starts another.
        name: The thread's.
    """

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._action = action
        self._name = name
        self._lock = threading.Lock()  # guards the two below; held for assignments only
        self._is_asked = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Have the action run, in any case from its beginning after this call. Does not wait; any thread."""
        with self._lock:
            self._is_asked = True
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had
            with self._lock:
                self._thread = None

    def join(self, timeout_s: float) -> bool:
        """Wait until what was asked for is done; return whether it is."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_asked:
                    self._thread = None
                    return
                self._is_asked = False
            try:
                self._action()
            except BaseException:
                with self._lock:
                    self._thread = None
                raise
