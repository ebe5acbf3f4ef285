"""Percentiles of times, kept in little memory."""

from __future__ import annotations

import numpy as np

_BUCKETS_PER_DECADE = 100
_DECADES = 9
"""From 0.1 µs to 100 s."""


class Latencies:
    """Percentiles of any number of latencies, in little memory: counted in buckets that are 2.3 % wide."""

    def __init__(self) -> None:
        self._counts = np.zeros(_DECADES * _BUCKETS_PER_DECADE, dtype=np.int64)
        self.max_us = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        us = seconds * 1e6
        self.max_us = max(self.max_us, us)
        bucket = int(np.log10(max(us, 0.1) / 0.1) * _BUCKETS_PER_DECADE)
        self._counts[min(bucket, len(self._counts) - 1)] += 1

    @property
    def count(self) -> int:
        """How many there were."""
        return int(self._counts.sum())

    def percentile_us(self, percent: float) -> float:
        """Return the upper end of the bucket in which the percentile lies; 0 where there are none."""
        if not self.count:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self._counts), self.count * percent / 100))
        return round(min(0.1 * 10 ** ((bucket + 1) / _BUCKETS_PER_DECADE), self.max_us), 1)

    def __str__(self) -> str:
        p50, p99 = self.percentile_us(50), self.percentile_us(99)
        return f"p50 {p50:.0f} µs, p99 {p99:.0f} µs, max {self.max_us:.0f} µs"
