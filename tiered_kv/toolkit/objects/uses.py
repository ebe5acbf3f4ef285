"""When blocks were stored and used, as far as this process knows. So sweeps spare used blocks.

The bucket knows only the time of a store. A used block is *renewed* if it is half as old as the blocks that sweeps
delete: the server copies it onto itself. Any thread may call.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

KNOWN_MAX: Final = 65_536  # blocks; the least recently used ones are forgotten first


class BlockUses:
    """Ages and uses of blocks, by name; times are seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both dictionaries
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """When a block was stored (minus infinity if unknown) and last used; by `time.monotonic()`."""
        self._gone: dict[str, None] = {}
        """Blocks that were in `_known` and were found to be deleted, until `take_gone` returns them."""

    def note_age(self, name: str, age_s: float) -> None:
        """Note the use of a block, and how old it is."""
        now_s = time.monotonic()
        self._note(name, now_s - age_s, now_s)

    def note_stored(self, name: str) -> None:
        """Note that a block was just stored or renewed. This does not count as a use."""
        self._note(name, time.monotonic(), -math.inf)

    def note_listed(self, name: str, age_s: float) -> None:
        """Note the age of a block that is known here. This does not count as a use."""
        with self._lock:
            if name in self._known:
                self._known[name] = time.monotonic() - age_s, self._known[name][1]

    def note_uses(self, names: Iterable[str]) -> None:
        now_s = time.monotonic()
        for name in names:
            self._note(name, -math.inf, now_s)

    def note_gone(self, name: str) -> None:
        """Note that a block has been deleted, by this process or another one."""
        with self._lock:
            if self._known.pop(name, None) is not None and len(self._gone) < KNOWN_MAX:
                self._gone[name] = None

    def take_gone(self, names: Iterable[str]) -> set[str]:
        """Return which of these blocks were deleted; each is returned once."""
        with self._lock:
            gone = {name for name in names if name in self._gone} if self._gone else set()
            for name in gone:
                del self._gone[name]
            return gone

    def age_s(self, name: str) -> float:
        """Return a block's age; infinite if unknown."""
        with self._lock:
            return time.monotonic() - self._known.get(name, (-math.inf, 0.0))[0]

    def unused_s(self, name: str, now_s: float) -> float:
        """Return how long before `now_s` this process last used a block; infinite if it has not."""
        with self._lock:
            return now_s - self._known.get(name, (0.0, -math.inf))[1]

    def _note(self, name: str, stored_s: float, used_s: float) -> None:
        with self._lock:
            known = self._known.get(name, (-math.inf, -math.inf))
            self._known[name] = max(stored_s, known[0]), max(used_s, known[1])
            self._known.move_to_end(name)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            if stored_s > -math.inf:
                self._gone.pop(name, None)
