"""A clock and a bounded wait, which tests use in place of sleeping. The test's thread calls."""

from __future__ import annotations

import time
from collections.abc import Callable


class ManualClock:
    """A monotonic clock that only `advance` moves; pass it in place of `time.monotonic`.

    It starts at `time.monotonic()`, because some tiers compare deadlines with the real clock. Any thread may call it;
    only one may move it.
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
        AssertionError: No call returned one within `timeout_s`; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(pause_s)
