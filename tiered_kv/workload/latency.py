"""Latencies, summed up in percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class LatencyUs:
    """The median, the 99th percentile and the greatest of some latencies, in microseconds."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, samples_s: Sequence[float]) -> LatencyUs:
        """Sum up samples in seconds; all zero where there are none."""
        if not len(samples_s):
            return cls(0.0, 0.0, 0.0)
        p50, p99, greatest = np.percentile(np.asarray(samples_s), [50, 99, 100]) * _US_PER_S
        return cls(round(float(p50), 1), round(float(p99), 1), round(float(greatest), 1))
