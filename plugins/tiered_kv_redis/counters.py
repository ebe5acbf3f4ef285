"""What happened since the tier was opened."""

from __future__ import annotations

import threading
from collections import Counter

FIXED = ("stored_blocks", "present_blocks", "loaded_blocks", "corrupt_blocks", "unanswered_lookups")
"""Counts that are there from the start; `failed_<reason>` ones come as they happen."""


class Counters:
    """Counts of events by name; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(FIXED, 0))

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more events of the kind `name`."""
        if count:
            with self._lock:
                self._counts[name] += count

    def get(self, name: str) -> int:
        """Return one count."""
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._lock:
            return dict(self._counts)
