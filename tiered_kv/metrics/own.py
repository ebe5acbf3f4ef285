"""A tier's own numbers: the mapping that its `stats` returned, read by the metrics that its type declares.

By the contract of a tier it maps names to numbers, or to mappings by label. A third-party tier may return anything, and
only this module takes it apart. The exporters and the engines' plugins read it, on any thread. What must stay true:
reading it is bounded, and calls no code that may raise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeGuard

from tiered_kv.metrics.histogram import HistogramValue, checked_histogram, is_histogram
from tiered_kv.metrics.metric import Metric

_DEPTH_MAX: Final = 4  # labels of a number
_NUMBERS_MAX: Final = 8192
"""Limit of numbers that are read from one tier's `stats`; the tenants that a tier may know have three each."""


class OwnNumber(NamedTuple):
    """One number or histogram that a tier counts itself."""

    name: str
    labels: tuple[str, ...]
    given: Any  # whatever the tier returned
    metric: Metric | None
    """None if the tier's type does not declare it."""

    @property
    def value(self) -> float | HistogramValue | None:
        """The value for Prometheus; None if it does not have the form that its metric says."""
        if self.metric is not None and len(self.labels) != len(self.metric.labels):
            return None
        if self.metric is not None and self.metric.bounds:
            return checked_histogram(self.given, self.metric.bounds)
        value = as_float(self.given)
        if self.metric is not None and self.metric.is_total and not (value is not None and 0 <= value < math.inf):
            return None  # a counter that NaN is added to once stays NaN
        return value


@dataclass(frozen=True, slots=True)
class OwnStats:
    """What a tier's `stats` returned, and the metrics that it may have, by name."""

    stats: Mapping[str, Any]  # Any: as in the module's description
    metrics: Mapping[str, Metric]

    def __iter__(self) -> Iterator[OwnNumber]:
        """Yield the tier's numbers, at most `_NUMBERS_MAX`; then a 0 for all others in `Metric.values`."""
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for name, labels, given in itertools.islice(self._given(), _NUMBERS_MAX):
            seen.add((name, labels))
            yield OwnNumber(name, labels, given, self.metrics.get(name))
        for name in list(self.stats):
            metric = self.metrics.get(name)
            for labels in () if metric is None else metric.values:
                if (name, labels) not in seen:
                    yield OwnNumber(name, labels, 0, metric)

    def number(self, name: str) -> float | None:
        """Return a number without labels; None if the tier has none."""
        found = self.stats.get(name)
        return found if is_finite(found) else None

    def _given(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        for name, value in list(self.stats.items()):
            for labels, given in _leaves(value, _DEPTH_MAX):
                yield str(name), labels, given


def _leaves(value: Any, depth_max: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the numbers and histograms in `value`, each with its labels."""
    if isinstance(value, Mapping) and not is_histogram(value):
        if depth_max:
            for label, inner in list(value.items()):
                yield from (((str(label), *labels), given) for labels, given in _leaves(inner, depth_max - 1))
    else:
        yield (), value


def as_float(number: object) -> float | None:
    """Return a number as Prometheus takes it; None for anything else."""
    if not isinstance(number, (int, float)):
        return None
    try:
        return float(number)
    except Exception:  # it is too large, or of a third-party class
        return None


def is_finite(number: object) -> TypeGuard[float]:
    """Return whether this is a number that JSON can hold."""
    value = as_float(number)
    return value is not None and math.isfinite(value)
