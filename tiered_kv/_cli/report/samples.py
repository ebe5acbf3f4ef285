"""Samples of a replay's counters: a bounded number, from its first step to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tiered_kv.exporters.metrics import is_finite
from tiered_kv.metrics.instruments import count_of
from tiered_kv.workload.tally import Tally

CountersByTier = Mapping[str, Mapping[str, Any]]  # Any: as `Counters.snapshot`

SAMPLES_MAX: Final = 100
INTERVAL_S: Final = 0.05
"""Between the first samples. It doubles when there are too many, so that short and long runs have about as many."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A replay at one moment, in totals since its start.

    Attributes:
        requests: Requests whose lookups were answered.
        blocks: Blocks of these requests.
        hits: Loaded blocks, by tier.
        counters: By tier.
    """

    seconds: float
    requests: int
    blocks: int
    hits: Mapping[str, int]
    steps: int
    counters: CountersByTier

    def count(self, tier: str, name: str) -> int:
        """Return a counter of a tier, summed over its labels."""
        return count_of(self.counters, tier, name)

    def use(self, tier: str) -> float | None:
        """Return the share of its capacity that a tier used, in percent; None if the tier does not report it."""
        counted = self.counters.get(tier, {})
        own = counted.get("tier", counted)  # of a secondary tier these are its own counters
        used, capacity = own.get("used_bytes"), own.get("capacity_bytes")
        return 100 * used / capacity if is_finite(used) and is_finite(capacity) and capacity else None


@dataclass(slots=True)
class Sampler:
    """Takes samples of a replay between its steps. The thread of the replay uses it.

    Attributes:
        counters: Returns the manager's counters.
        step_s: Seconds of each step; known at the end.
    """

    counters: Callable[[], CountersByTier]
    clock: Callable[[], float] = time.monotonic
    samples: list[Sample] = field(default_factory=list)
    step_s: Sequence[float] = ()
    _interval_s: float = INTERVAL_S
    _next_s: float = 0.0
    _started_s: float = 0.0
    _tally: Tally = field(default_factory=lambda: Tally(hits={}))

    def start(self) -> None:
        """Take the first sample, at second 0."""
        self._started_s = self.clock()
        self._take()

    def note(self, tally: Tally) -> None:
        """Take a sample if it is time for one. Called after each step; costs one call of the clock."""
        self._tally = tally
        if self.clock() - self._started_s >= self._next_s:
            self._take()

    def finish(self) -> None:
        """Take the last sample, after the last stores have ended."""
        self._take()
        self.step_s = self._tally.step_s

    def _take(self) -> None:
        if len(self.samples) >= SAMPLES_MAX:
            del self.samples[1::2]
            self._interval_s *= 2
        seconds, tally = self.clock() - self._started_s, self._tally
        hits, steps = dict(tally.hits), len(tally.step_s)
        self.samples.append(Sample(seconds, tally.requests, tally.blocks, hits, steps, self.counters()))
        self._next_s = seconds + self._interval_s
