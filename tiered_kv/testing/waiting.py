"""Bounded waiting for the effect of another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, *, pause_s: float = 0.005, what: str = "the condition"
) -> None:
    """Call `condition` every `pause_s` until it returns a true value.

    Raises:
        AssertionError: It did not within `timeout_s`; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(pause_s)
