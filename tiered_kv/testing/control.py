"""What a test controls in place of sleeping: a gate for threads, a clock, and a bounded wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


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


class ManualClock:
    """A monotonic clock that only `advance` moves; pass it in place of `time.monotonic`.

    It starts at `time.monotonic()`, because some tiers compare deadlines with the real clock. Any thread may call it;
    one may move it.
    """

    def __init__(self) -> None:
        self._now_s = time.monotonic()

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back by {-seconds} s")
        self._now_s += seconds


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, *, pause_s: float = 0.001, what: str = "the condition"
) -> None:
    """Call `condition` every `pause_s` until it returns a true value.

    Raises:
        AssertionError: It did not within `timeout_s`; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(pause_s)
