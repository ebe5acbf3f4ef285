"""A clock that only a test moves."""

from __future__ import annotations

import time


class ManualClock:
    """A monotonic clock that stands still until it is moved; pass it where `time.monotonic` is taken.

    It starts at `time.monotonic()`, so that deadlines made from it mean something to tiers that look at the
    real clock. Call it on any thread, move it on one.
    """

    def __init__(self) -> None:
        self._now_s = time.monotonic()

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back by {-seconds} s")
        self._now_s += seconds
