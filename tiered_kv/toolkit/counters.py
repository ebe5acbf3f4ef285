"""Counts of what happened, kept by whichever thread it happened on."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Counters:
    """Counts of events by name. Any thread may call.

    A plugin derives its own, which says what its names mean, and hands `snapshot()` on in `stats`.

    Args:
        names: What is counted, and shown, from the start.
        families: What other names may begin with; they are shown once they have been counted.
    """

    def __init__(self, names: Iterable[str], families: Iterable[str] = ()) -> None:
        self._counts = dict.fromkeys(names, 0)
        self._families = tuple(families)
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more events of the kind `name`.

        Raises:
            KeyError: There is no such name, nor family.
        """
        with self._lock:
            if name not in self._counts and not name.startswith(self._families):
                raise KeyError(name)
            self._counts[name] = self._counts.get(name, 0) + count

    def __getitem__(self, name: str) -> int:
        """Return one count; 0 for a name of a family that has not been counted."""
        found = self._counts.get(name)
        if found is None:
            if not name.startswith(self._families):
                raise KeyError(name)
            return 0
        return found

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._lock:
            return dict(self._counts)
