"""What lies in a shared storage and this process can neither read nor delete: not offered here, and replaced.

A record may be in a codec that is not installed here, or encrypted with a key that is not here. Others may be able to
read it, so a failed load does not delete it. A damaged one nobody can read, and it is deleted; but the storage may
refuse that. As long as either were taken for the block, every load of it would fail, and no store would end that,
since a block that is there is not stored again. So a tier whose storage is shared keeps this memory:

- a load that finds a record of others, or cannot delete a damaged one, notes its name;
- a lookup answers False for a name that is noted;
- a store of such a block replaces what lies there, and forgets the name. So does a load that succeeds.

A fleet in the middle of a change of keys or codecs converges by that: who stores writes what those who were changed
last can read. Who has wrong keys, and only loads, removes nothing.

The memory is bounded. A name that is dropped, by age or for want of room, costs one more load that fails, if what
lies there is still the same. That is also when a record is found that another process has put in its place meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

NAMES_MAX: Final = 65_536
"""Names that are kept, the ones that were noted last; some 19 MB where each has 90 characters (by tracemalloc)."""
LIFETIME_S: Final = 300.0
"""How long a name is kept, in seconds. A hot block that nobody stores fails one load in that time, and one that another
process has replaced is found after it at the latest."""


class Unreadable(Generic[Name]):
    """The names of records that this process could not read, and that are still there. Any thread may call.

    A name stands for one place in the storage, in one epoch: after a reset the same block has another one. Where a
    load and a store of one block end at the same time, a name may be noted that has just been made good. It is a miss
    until it is dropped, or the block is stored again.

    Args:
        names_max: As `NAMES_MAX`, at least 1.
        lifetime_s: As `LIFETIME_S`.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        names_max: int = NAMES_MAX,
        lifetime_s: float = LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if names_max < 1:
            raise ValueError(f"names_max must be at least 1, not {names_max}")
        self._names_max = names_max
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._lock = threading.Lock()  # guards the names; held for a few steps in the dictionary, never across I/O
        self._until_s: OrderedDict[Name, float] = OrderedDict()  # the one that was noted longest ago first

    def note(self, names: Iterable[Name]) -> None:
        """Keep names of records that could not be read."""
        with self._lock:
            until_s = self._clock() + self._lifetime_s
            for name in names:
                self._until_s[name] = until_s
                self._until_s.move_to_end(name)
                if len(self._until_s) > self._names_max:
                    self._until_s.popitem(last=False)

    def forget(self, names: Iterable[Name]) -> None:
        """Drop names of records that can be read now; the names are not looked at where none is kept."""
        if not self._until_s:
            return
        with self._lock:
            for name in names:
                self._until_s.pop(name, None)

    def __contains__(self, name: Name) -> bool:
        """Return whether a name is kept."""
        if not self._until_s:  # nearly always, and then without the lock
            return False
        with self._lock:
            self._drop_old()
            return name in self._until_s

    def __len__(self) -> int:
        """Return how many names are kept."""
        with self._lock:
            self._drop_old()
            return len(self._until_s)

    def _drop_old(self) -> None:
        now_s = self._clock()
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
