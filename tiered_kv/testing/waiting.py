"""Waiting, with a limit, for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, *, pause_s: float = 0.005, what: str = "the condition"
) -> None:
    """Return once `condition` holds.

    Args:
        condition: Asked again and again, on the caller's thread; it holds when it returns something true.
        timeout_s: How long to wait. It is there to end a test that fails, and so generous.
        pause_s: The time between two questions.
        what: What is waited for, as the error says it.

    Raises:
        AssertionError: It did not come about in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(pause_s)
