"""How long a tier's jobs and lookups take, and how large its jobs are."""

from __future__ import annotations

from typing import Any

from tiered_kv.observe.histogram import BYTES, SECONDS, SHORT_SECONDS, Histogram

DIRECTIONS = ("store", "load")


class TierMeasures:
    """The histograms of one secondary tier. The manager's thread adds, any thread may read.

    Attributes:
        lookup_seconds: How long the tier took to answer a lookup.
        noted_s: The step whose first late answer is in `lookup_seconds` already, by the time of its beginning.
    """

    __slots__ = ("_job_bytes", "_job_seconds", "lookup_seconds", "noted_s")

    def __init__(self) -> None:
        self.lookup_seconds = Histogram(SHORT_SECONDS)
        self.noted_s = 0.0
        self._job_seconds = {direction: Histogram(SECONDS) for direction in DIRECTIONS}
        self._job_bytes = {direction: Histogram(BYTES) for direction in DIRECTIONS}

    def add_job(self, direction: str, seconds: float, size_bytes: int) -> None:
        """Count a job that the tier has reported, whatever became of it."""
        self._job_seconds[direction].add(seconds)
        self._job_bytes[direction].add(size_bytes)

    def snapshot(self) -> dict[str, Any]:  # Any: as `Histogram.snapshot`, some by direction
        """Return all histograms by name."""
        return {
            "job_seconds": {direction: seconds.snapshot() for direction, seconds in self._job_seconds.items()},
            "job_bytes": {direction: sizes.snapshot() for direction, sizes in self._job_bytes.items()},
            "lookup_seconds": self.lookup_seconds.snapshot(),
        }
