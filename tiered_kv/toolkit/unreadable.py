"""Records in shared storage that this process can neither read nor delete: they are not offered, and are replaced.

A record may have a codec or a key that this process lacks. Other processes may be able to read it, so a failed load
does not delete it. A damaged record is deleted, but the storage may refuse that. If such a record counted as the block,
every load would fail. No store would end that, because an existing block is not stored again. So a tier with shared
storage remembers the names of such records:

- a load that finds a record of others, or cannot delete a damaged one, notes its name;
- a lookup answers False for a name that is noted;
- a store of such a block replaces the record, and removes the name. A load that succeeds removes it, too.

So a fleet converges during a change of keys or codecs: each store writes records that the processes with
the new settings can read. A process with wrong keys that only loads deletes nothing.

The number of names is bounded. A name that is removed, by age or for lack of room, costs one more failed load, if the
record is still the same. If another process has replaced the record meanwhile, this load finds the new one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

NAMES_MAX: Final = 65_536
"""Names that are kept, the latest ones; about 19 MB if each has 90 characters (by tracemalloc)."""
LIFETIME_S: Final = 300.0
"""How long a name is kept, in seconds. A hot block that no process stores fails one load in that time. One that another
process has replaced is found after that time."""


class Unreadable(Generic[Name]):
    """The names of stored records that this process could not read. Any thread may call.

    A name stands for one place in the storage, in one epoch: after a reset the same block has another one. If a
    load and a store of one block end at the same time, the name of a good record may be noted. It is a miss
    until the name is removed, or the block is stored again.

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
        self._until_s: OrderedDict[Name, float] = OrderedDict()  # the oldest first

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
        """Remove names of records that can be read now; `names` is not evaluated if none is kept."""
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
