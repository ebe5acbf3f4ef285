"""The rate of lines in the log: a failure that repeats is logged again after a pause, and does not fill the log.

Tiers, exporters and servers ask before they log a failure. Any thread may ask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

PAUSE_S: Final = 600.0
_ROUNDING_S: Final = 0.001
"""Sums of a clock's seconds are not exact."""
KINDS_MAX: Final = 64
"""Limit of the kinds of lines. Lines of a further kind are not logged until the pause of an earlier kind is over."""


class LogLimit:
    """Lets `at_once` lines of each kind through in a row, then one each `pause_s`. Any thread may call."""

    def __init__(self, pause_s: float = PAUSE_S, at_once: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s = pause_s
        self._ahead_s = (at_once - 1) * pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """When the credit of each kind is full again, and how many lines were left out."""

    def take(self, kind: Hashable = "") -> int | None:
        """Return how many lines of this kind were left out since the last one; None if this one is left out, too."""
        now_s = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                self._kinds = {each: state for each, state in self._kinds.items() if state[0] > now_s}
                if len(self._kinds) >= KINDS_MAX:
                    return None
            full_s, left_out = self._kinds.get(kind, (now_s, 0))
            if full_s - now_s > self._ahead_s + _ROUNDING_S:
                self._kinds[kind] = full_s, left_out + 1
                return None
            self._kinds[kind] = max(full_s, now_s) + self._pause_s, 0
            return left_out

    @property
    def about(self) -> str:
        """The end of a line: it says that further lines of this kind are left out."""
        return f"further ones are only counted for {round(self._pause_s / 60)} minutes"
