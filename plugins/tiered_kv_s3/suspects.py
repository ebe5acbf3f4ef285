"""Blocks that the bucket does not answer for while it answers for others: each counts against itself, not the tier.

A block whose reads failed is a miss for a while: at once where the bucket answered the same of another block meanwhile,
else after its second failure, since a bucket that answers for nothing fails as a whole.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

BLOCKS_MAX = 4096
"""Blocks that are remembered; the oldest go first."""
MISS_S = 30.0
"""How long a block is a miss after a failure."""
_FAILURES_ALONE = 2


class Way(Enum):
    """What is asked of the bucket. It may allow one and not the other, or answer what is short and stall at bodies."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


class Suspects:
    """Blocks that fail by themselves. Any thread may call; times are seconds of the clock.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the rest
        self._answered_s = dict.fromkeys(Way, float("-inf"))
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()  # name to (last time, how often)

    def note_answer(self, way: Way) -> None:
        """Note that the bucket has answered for a block."""
        self._answered_s[way] = self._clock()

    def note_failed_read(self, way: Way, name: str, began_s: float) -> bool:
        """Note that a read failed; return whether it counts against the block alone.

        Args:
            way: What was asked.
            name: The block's.
            began_s: When the read began.
        """
        is_alone = self.has_answered(way, began_s)
        with self._lock:
            _, failures = self._failed.pop(name, (0.0, 0))
            self._failed[name] = (self._clock(), failures + (_FAILURES_ALONE if is_alone else 1))
            if len(self._failed) > BLOCKS_MAX:
                self._failed.popitem(last=False)
        return is_alone

    def has_answered(self, way: Way, began_s: float) -> bool:
        """Return whether the bucket has answered this for any block since `began_s`."""
        return self._answered_s[way] >= began_s

    def __contains__(self, name: str) -> bool:
        with self._lock:
            failed_s, failures = self._failed.get(name, (0.0, 0))
            return failures >= _FAILURES_ALONE and self._clock() - failed_s < MISS_S

    def forget(self, name: str) -> None:
        """The bucket has answered for the block."""
        if self._failed:
            with self._lock:
                self._failed.pop(name, None)
