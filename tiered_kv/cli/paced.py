"""The rate of a verb that reads much: it sleeps, so that others get their share of the disk or the network.

`inspect --verify` and `copy` call it, on the thread that reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_SHOW_INTERVAL_S = 0.1
_SLEEP_MIN_S = 0.01
_LAG_MAX_S = 1.0
"""Limit of the seconds that the work catches up. Slow reads and long sleeps put it behind its rate."""


def paced(rate_bytes: int | None, show: Callable[[int], None], deadline: float) -> Callable[[int], None]:
    """Return a callback that gets the bytes of each part of the work, and sleeps to keep to the rate; None for no rate.

    For small parts, the callback sleeps and shows progress once for many of them: both take longer than one part.
    """
    done_bytes = 0
    due_s = shown_s = time.monotonic()

    def on_block(size_bytes: int) -> None:
        nonlocal done_bytes, due_s, shown_s
        now_s = time.monotonic()
        done_bytes += size_bytes
        if rate_bytes is not None:
            due_s = max(due_s, now_s - _LAG_MAX_S) + size_bytes / rate_bytes
        if now_s - shown_s >= _SHOW_INTERVAL_S:
            show(done_bytes)
            shown_s = now_s
        if due_s - now_s >= _SLEEP_MIN_S:
            time.sleep(max(0.0, min(due_s, deadline) - now_s))

    return on_block
