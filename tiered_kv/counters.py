"""Counts of events. Any thread may count.

A counter's name is a noun that ends with its unit, followed by `_total` if it only grows. Directions, reasons and the
like are labels: the counts stand in a dictionary by the first label, then by the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tiered_kv.observe.histogram import is_histogram

LABELS_MAX: Final = 64
"""The most combinations of labels that one counter has: some labels are words of storage, or of a stranger's tier."""
OTHER: Final = "other"
"""The last label of what is counted beyond them."""


class Counters:
    """Counts of events by name and labels. Any thread may call.

    A plugin returns `snapshot()` from its tier's `stats`. `observe/vocabulary.py` explains the built-in tiers' names.

    Args:
        names: Counters without labels, shown from the start.
        labelled: Counters with labels. A label is shown once it has been counted. Beyond `LABELS_MAX`
            combinations, the last label of a new one is `OTHER`.
    """

    def __init__(self, names: Iterable[str], labelled: Iterable[str] = ()) -> None:
        self._counts: dict[tuple[str, ...], int] = {(name,): 0 for name in names}
        self._labelled = dict.fromkeys(labelled, 0)  # how many combinations of labels each has
        self._lock = threading.Lock()

    def add(self, name: str, *labels: str, count: int = 1) -> None:
        """Count `count` more events of the kind `name`.

        Raises:
            KeyError: The name is unknown, it has labels and none are given, or it has none and some are given.
        """
        path = (name, *labels)
        with self._lock:
            if path not in self._counts:
                path = self._new_path(name, labels)
            self._counts[path] = self._counts.get(path, 0) + count

    def _new_path(self, name: str, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return where to count what has labels that no event had before; under the lock."""
        if not labels or name not in self._labelled:
            raise KeyError(name)
        if self._labelled[name] >= LABELS_MAX:
            return (name, *labels[:-1], OTHER)
        self._labelled[name] += 1
        return (name, *labels)

    def __getitem__(self, name: str) -> int:
        """Return the count of a name without labels."""
        return self._counts[name,]

    def snapshot(self) -> dict[str, Any]:  # Any: a number, or a dictionary of them by label
        """Return all counts by name; those with labels in dictionaries by label."""
        with self._lock:
            counts = list(self._counts.items())
        nested: dict[str, Any] = {}
        for (*above, last), count in counts:
            inner = nested
            for step in above:
                inner = inner.setdefault(step, {})
            inner[last] = count
        return nested


def flat_counts(counters: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each number of counters, and the names and labels that lead to it; histograms are left out."""
    for name, value in counters.items():
        if is_histogram(value):
            continue
        if isinstance(value, Mapping):
            yield from (((name, *path), count) for path, count in flat_counts(value))
        else:
            yield (name,), value


def count_of(counters: Mapping[str, Any], *path: str) -> int:
    """Return the number at `path` of counters, or the sum of those below it; 0 where there is none."""
    value: Any = counters  # Any: as `snapshot`
    for step in path:
        value = value.get(step, 0) if isinstance(value, Mapping) else 0
    return sum(count for _, count in flat_counts(value)) if isinstance(value, Mapping) else int(value)
