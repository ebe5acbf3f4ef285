"""Records in shared storage that this process can neither read nor delete: they are not offered, and are replaced.

A record may be in a codec that is not installed here, or encrypted with a key that is not here. Others may be able to
read it, so a failed load does not delete it. A damaged record is deleted; but the storage may refuse that. If such a
record were taken for the block, every load of it would fail, and no store would end that, since a block that is there
is not stored again. So a tier whose storage is shared keeps this memory:

- a load that finds a record of others, or cannot delete a damaged one, notes its name;
- a lookup answers False for a name that is noted;
- a store of such a block replaces the record, and forgets the name. So does a load that succeeds.

A name that is dropped, by age or for want of room, costs one more load that fails, if the record is still the same.
`encryption.md` says how a fleet converges in the middle of a change of keys.
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
"""How long a name is kept. A hot block that nobody stores fails one load in that time."""


class Unreadable(Generic[Name]):
    """The names of stored records that this process could not read. Any thread may call.

    A name stands for one place in the storage, in one epoch: after a reset the same block has another one. Where a
    load and a store of one block end at the same time, a name may be noted that has just been made good.
    """

    def __init__(self, *, names_max: int = NAMES_MAX, clock: Callable[[], float] = time.monotonic) -> None:
        self._names_max = names_max
        self._clock = clock
        self._lock = threading.Lock()  # guards the names; held for a few steps in the dictionary, never across I/O
        self._noted_s: OrderedDict[Name, float] = OrderedDict()  # the one that was noted longest ago first

    def note(self, names: Iterable[Name]) -> None:
        """Keep names of records that could not be read."""
        with self._lock:
            for name in names:
                self._noted_s[name] = self._clock()
                self._noted_s.move_to_end(name)
                if len(self._noted_s) > self._names_max:
                    self._noted_s.popitem(last=False)

    def forget(self, names: Iterable[Name]) -> None:
        """Drop names of records that can be read now; the names are not looked at where none is kept."""
        if self._noted_s:
            with self._lock:
                for name in names:
                    self._noted_s.pop(name, None)

    def __contains__(self, name: Name) -> bool:
        """Return whether a name is kept."""
        noted_s = self._noted_s.get(name)
        return noted_s is not None and self._clock() < noted_s + LIFETIME_S

    def __len__(self) -> int:
        """Return how many names are kept, those included that are too old."""
        return len(self._noted_s)
