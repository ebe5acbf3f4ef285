"""Waiting, with a limit, for the effect of another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, *, pause_s: float = 0.005, what: str = "the condition"
) -> None:
    """Return once `condition` holds.

    Args:
        condition: Called again and again, on the caller's thread; it holds when it returns a true value.
        timeout_s: How long to wait. It only ends tests that fail, so it is generous.
        pause_s: The time between two calls.
        what: What is waited for, as the error says it.

    Raises:
        AssertionError: It did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(pause_s)
