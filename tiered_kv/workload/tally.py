"""The counters of a replay, and its report.

A `Replay` owns its `Tally`, and changes it on its one thread. Commands read both on the same thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GB = 1e9
_US_PER_S = 1e6
_CORRUPT_SHOWN = 10  # blocks in a report, at most


@dataclass(frozen=True, slots=True)
class LatencyUs:
    """Percentiles of latencies, in microseconds."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, samples_s: Sequence[float]) -> LatencyUs:
        """Return the percentiles of samples in seconds; zeros without samples."""
        if not len(samples_s):
            return NO_LATENCY
        p50, p99, greatest = np.percentile(np.asarray(samples_s), [50, 99, 100]) * _US_PER_S
        return cls(round(float(p50), 1), round(float(p99), 1), round(float(greatest), 1))


NO_LATENCY = LatencyUs(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CorruptBlock:
    """A block that was loaded with wrong bytes; `offset` is its first wrong byte."""

    hash_id: int
    tier: str
    offset: int


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Traffic of one tier during a replay; rates are averages over the run, in 1e9 bytes per second."""

    hits: int
    stored_bytes: int
    loaded_bytes: int
    store_gb_per_s: float
    load_gb_per_s: float
    counters: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counters of a replay; `docs/reference/command.md` describes each field."""

    hits: dict[str, int]
    requests: int = 0
    blocks: int = 0
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    stored_blocks: int = 0
    skipped_stores: int = 0
    first_request_hits: int = 0
    timed_out_requests: int = 0
    corrupt: list[CorruptBlock] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ReplayReport(Counts):
    """The result of a replay; `docs/reference/command.md` describes each field."""

    misses: int
    hit_rate: float
    seconds: float
    spent_s: dict[str, float]
    step_us: LatencyUs
    steps: int
    block_bytes: int
    interrupted: bool
    drained: bool
    tiers: dict[str, TierTraffic]


@dataclass(slots=True, kw_only=True)
class Tally(Counts):
    """Counters of a running replay, with the time of each step.

    `step_s` has the time inside the manager for each step. `bytes_s` is the time to write and compare bytes, and
    `waiting_s` the time of waits for storage.
    """

    step_s: array[float] = field(default_factory=lambda: array("d"))
    bytes_s: float = 0.0
    waiting_s: float = 0.0

    def note_corrupt(self, block: CorruptBlock) -> None:
        self.corrupt_blocks += 1
        if len(self.corrupt) < _CORRUPT_SHOWN:
            self.corrupt.append(block)


def traffic(hits: int, counters: Mapping[str, Any], seconds: float) -> TierTraffic:
    """Return the traffic of a tier in this time, from its hits and the manager's counters."""
    stored_bytes = counters.get("stored_bytes_total", 0)
    loaded_bytes = counters.get("loaded_bytes_total", 0)
    return TierTraffic(
        hits=hits,
        stored_bytes=stored_bytes,
        loaded_bytes=loaded_bytes,
        store_gb_per_s=round(stored_bytes / GB / seconds, 3) if seconds else 0.0,
        load_gb_per_s=round(loaded_bytes / GB / seconds, 3) if seconds else 0.0,
        counters=dict(counters),
    )
