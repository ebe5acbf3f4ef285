"""A gate that blocks threads until a test opens it."""

from __future__ import annotations

import threading


class Gate:
    """Open or closed; any thread may use it."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._opened = threading.Event()
        self.waiting = 0
        """How many threads wait at the gate; read only."""
        self._lock = threading.Lock()
        if is_open:
            self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        """Let all threads pass, from now on."""
        self._opened.set()

    def close(self) -> None:
        """Block every thread that arrives from now on."""
        self._opened.clear()

    def pass_through(self) -> None:
        """Return once the gate is open; waits without a limit."""
        if self._opened.is_set():
            return
        with self._lock:
            self.waiting += 1
        try:
            self._opened.wait()
        finally:
            with self._lock:
                self.waiting -= 1
