"""Notices for an operator: the last changes in a stack, such as an opened breaker.

Guarded tiers and the manager add them, `/status` and `tiered-kv top` show them. Any thread may add and read. There are
at most `NOTICES_MAX`, and none holds a key, a path or a text from elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

NOTICES_MAX: Final = 64
"""Limit of pairs of a tier and a change; beyond it the latest are kept."""


class Notices:
    """One notice for each tier and change. Any thread may add and read.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._notices: dict[tuple[str, str], tuple[float, int]] = {}  # the last time and the count; the latest last

    def add(self, tier: str, what: str, count: int = 1) -> None:
        """Note a change that happened `count` times in a tier.

        `what` holds no key, path or text from elsewhere.
        """
        with self._lock:
            _, before = self._notices.pop((tier, what), (0.0, 0))
            self._notices[tier, what] = self._clock(), before + count
            if len(self._notices) > NOTICES_MAX:
                del self._notices[next(iter(self._notices))]

    def snapshot(self) -> list[dict[str, object]]:
        """Return the notices, the oldest first: `time` (of the last, since 1970), `tier`, `what` and `count`."""
        with self._lock:
            notices = list(self._notices.items())
        return [
            {"time": last_s, "tier": tier, "what": what, "count": count} for (tier, what), (last_s, count) in notices
        ]
