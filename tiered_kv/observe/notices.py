"""Notices: the last changes of state that an operator wants to know of, with their times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

NOTICES_MAX: Final = 64
_GROUP_S: Final = 60.0
"""Notices of one kind from one tier, nearer to each other than this, are one that is counted."""


class Notices:
    """The last `NOTICES_MAX` notices. Any thread may add and read.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._notices: deque[_Notice] = deque(maxlen=NOTICES_MAX)

    def add(self, tier: str, what: str, count: int = 1) -> None:
        """Note that something happened `count` times in a tier; call it for changes only.

        Args:
            tier: The tier's name.
            what: What happened, in words that hold no key, path or text from elsewhere.
            count: How often since the last call; it is told where it is more than once.
        """
        now_s = self._clock()
        for notice in reversed(self._notices.copy()):
            if notice.tier == tier:
                if notice.what == what and now_s - notice.last_s < _GROUP_S:
                    notice.count += count
                    notice.last_s = now_s
                    return
                break
        self._notices.append(_Notice(now_s, tier, what, count))

    def snapshot(self) -> list[dict[str, object]]:
        """Return the notices, the oldest first: `time` (seconds since 1970), `tier` and `what`."""
        return [
            {
                "time": notice.last_s,
                "tier": notice.tier,
                "what": notice.what if notice.count == 1 else f"{notice.what} ({notice.count} times)",
            }
            for notice in self._notices.copy()
        ]


class _Notice:
    """Something that happened in a tier `count` times, at `last_s` the last time."""

    __slots__ = ("count", "last_s", "tier", "what")

    def __init__(self, now_s: float, tier: str, what: str, count: int) -> None:
        self.last_s = now_s
        self.tier = tier
        self.what = what
        self.count = count
