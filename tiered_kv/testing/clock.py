"""A clock that only a test moves."""

from __future__ import annotations

import time


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
