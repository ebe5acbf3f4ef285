"""Records in shared storage that this process can neither read nor delete.

A record may need a codec or a key that this process lacks. Other processes may be able to read it, so a failed load
does not delete it. A damaged record is deleted, but the storage may refuse that. If this process took such a record for
the block, each load of it would fail, and no store would replace it. So a tier with shared storage keeps their names:

- A load that finds an unreadable record, or cannot delete a damaged one, notes its name.
- A lookup of a noted name is a miss.
- A store replaces the record and forgets the name. A load that succeeds forgets it too.

A name that is dropped early costs one more failed load. `docs/how-to/encryption.md` describes a change of keys.
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
"""How long a name is kept. A block that is never stored again fails one load in this time."""


class Unreadable(Generic[Name]):
    """The names of records that this process could not read. Any thread may call.

    A name stands for one place in the storage in one epoch.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the names; never held during I/O
        self._noted_s: OrderedDict[Name, float] = OrderedDict()  # oldest first

    def note(self, names: Iterable[Name]) -> None:
        with self._lock:
            for name in names:
                self._noted_s[name] = self._clock()
                self._noted_s.move_to_end(name)
                if len(self._noted_s) > NAMES_MAX:
                    self._noted_s.popitem(last=False)

    def forget(self, names: Iterable[Name]) -> None:
        """Drop names of records that can be read now. If no name is kept, `names` is not iterated."""
        if self._noted_s:
            with self._lock:
                for name in names:
                    self._noted_s.pop(name, None)

    def __contains__(self, name: Name) -> bool:
        noted_s = self._noted_s.get(name)
        return noted_s is not None and self._clock() < noted_s + LIFETIME_S
