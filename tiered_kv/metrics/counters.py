"""Counters of events, by name and labels, and functions that read their snapshots.

The account of each tier and the tiers themselves count. Any thread may count, and any may read. A name ends with its
unit, then with `_total` if it only grows. Directions and reasons are labels: such a counter is a dictionary by the
first label, then by the next. The number of their combinations stays bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tiered_kv.metrics.histogram import is_histogram
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.series import Family, Labels

LABELS_MAX: Final = 64
"""Limit of label combinations of one counter: some labels are words from storage, or from third-party tiers."""
OTHER: Final = "other"
"""Replaces the last label of an event beyond this limit. Beyond the next limit it replaces all labels."""
OTHERS_MAX: Final = 7
"""Limit of combinations in which `OTHER` replaces the last label only."""


class Counters:
    """Counts events by name and labels. Any thread may call.

    A plugin returns `snapshot()` from its tier's `stats`.

    Args:
        metrics: The metrics that may be counted. Gauges, which may also fall, are left out: a tier reports them itself.
            A counter without labels begins with 0. With labels, each combination appears with its first event. Beyond
            `LABELS_MAX` combinations, `OTHER` replaces the last label of a new one; beyond `OTHERS_MAX` of these, it
            replaces each label.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics if metric.is_total}
        self._values: dict[str, dict[Labels, int]] = {
            name: {} if metric.labels else {(): 0} for name, metric in self._metrics.items()
        }
        self._lock = threading.Lock()

    def add(self, name: str, *labels: str, count: int = 1) -> None:
        """Count `count` events; raises `KeyError` for an unknown name, or labels that are missing or not expected."""
        with self._lock:
            values = self._values[name]
            if labels not in values:
                if not labels or len(labels) != len(self._metrics[name].labels):
                    raise KeyError(name)
                if len(values) >= LABELS_MAX:
                    labels = (*labels[:-1], OTHER)
                    if labels not in values and len(values) >= LABELS_MAX + OTHERS_MAX:
                        labels = (OTHER,) * len(labels)
            values[labels] = values.get(labels, 0) + count

    def __getitem__(self, name: str) -> int:
        """Return a counter without labels."""
        return self._values[name][()]

    def total(self, name: str, *labels: str) -> int:
        """Return the sum of a counter over all combinations of labels that begin with `labels`."""
        with self._lock:
            values = self._values[name].copy()
        return sum(count for counted, count in values.items() if counted[: len(labels)] == labels)

    def families(self) -> list[Family]:
        """Return all counters; one with labels has no value before its first event."""
        with self._lock:
            return [Family(metric, self._values[name].copy()) for name, metric in self._metrics.items()]

    def snapshot(self) -> dict[str, Any]:  # Any: a number, or a dictionary of them by label
        """Return all counters by name; a counter with labels is a dictionary by label, empty before its first event."""
        return {family.metric.name: family.nested() for family in self.families()}


def flat_counts(counters: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield (name and labels, count) of each counter; histograms are left out."""
    for name, value in counters.items():
        if is_histogram(value):
            continue
        if isinstance(value, Mapping):
            yield from (((name, *path), count) for path, count in flat_counts(value))
        else:
            yield (name,), value


def count_of(counters: Mapping[str, Any], *path: str) -> int:
    """Return the counter at `path` (a name, then labels), or the sum of all below it; 0 if it is absent."""
    value: Any = counters  # Any: as `snapshot`
    for step in path:
        value = value.get(step, 0) if isinstance(value, Mapping) else 0
    return sum(count for _, count in flat_counts(value)) if isinstance(value, Mapping) else int(value)
