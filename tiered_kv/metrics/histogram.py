"""Histograms: counts of values by size, the bounds of their buckets, and quantiles of their snapshots.

The manager's thread adds times and sizes of jobs, lookups and steps; exporters read on any thread. What must stay true:
a histogram's buckets never change, and no count becomes smaller. There is no lock, so the counts and the sum of a
snapshot may differ by the last value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, TypeGuard

SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets of jobs."""
SHORT_SECONDS: Final = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, *SECONDS)
"""Buckets of lookups and steps. The shortest lookup is one in a dictionary."""
BYTES: Final = tuple(float(4 << 10 << shift) for shift in range(0, 20, 2))
"""Buckets of jobs' sizes: 4 KiB to 1 GiB, by factors of four."""
INFINITY: Final = "+Inf"
"""The last bucket."""


class HistogramValue(TypedDict):
    """A histogram at one moment: `buckets` has the number of values in each bucket, by the bucket's largest value.

    A value counts in one bucket only, unlike in Prometheus.
    """

    sum: float
    count: int
    buckets: dict[str, int]


class Histogram:
    """Counts of values by size. One thread adds, any thread may read.

    Args:
        bounds: The largest value of each bucket, rising. A further bucket has all larger values.
    """

    __slots__ = ("_bounds", "_counts", "_names", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._names = _names(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramValue:
        counts, total = self._counts.copy(), self._sum
        return {"sum": total, "count": sum(counts), "buckets": dict(zip(self._names, counts, strict=True))}


def _names(bounds: Sequence[float]) -> list[str]:
    """Return the names of the buckets."""
    return [*map(repr, bounds), INFINITY]


def is_histogram(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is meant as the snapshot of a histogram."""
    return isinstance(value, Mapping) and isinstance(value.get("buckets"), Mapping)


def checked_histogram(value: object, bounds: Sequence[float]) -> HistogramValue | None:
    """Return the snapshot of a histogram with these bounds; None for anything else."""
    if not is_histogram(value):
        return None
    total, buckets = value.get("sum"), dict(value["buckets"])
    if not isinstance(total, float) or not math.isfinite(total) or [*buckets] != _names(bounds):
        return None
    if not all(type(count) is int and count >= 0 for count in buckets.values()):
        return None
    return {"sum": total, "count": sum(buckets.values()), "buckets": buckets}


def quantile(histogram: Mapping[str, Any], share: float) -> float | None:  # Any: as `Histogram.snapshot`
    """Return an estimate of a quantile; None without values. A share of 0.99 is the 99th percentile.

    It is interpolated within its bucket, as Prometheus' `histogram_quantile` does. In the last bucket it is the largest
    bound.
    """
    rank = share * histogram["count"]
    if not histogram["count"]:
        return None
    below, seen = 0.0, 0
    for name, count in histogram["buckets"].items():
        bound = float(name)
        if count and seen + count >= rank:
            return below if bound == math.inf else below + (bound - below) * (rank - seen) / count
        seen, below = seen + count, below if bound == math.inf else bound
    return below
