"""What a replay's counters were while it ran: a bounded number of samples, from its first step to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tiered_kv.counters import count_of
from tiered_kv.observe.series import is_finite
from tiered_kv.workload.tally import Tally

Counted = Mapping[str, Mapping[str, Any]]  # Any: as `Counters.snapshot`

SAMPLES_MAX: Final = 200
INTERVAL_S: Final = 0.05
"""Between the first samples. It doubles whenever there are too many, so that short and long runs have about as many."""


@dataclass(frozen=True, slots=True)
class TierSample:
    """One tier at one moment: what it moved, skipped and failed so far, what it holds, and its breaker.

    Bytes held and allowed are None where the tier does not tell. `breaker` is 0 closed, 1 half open, 2 open; None for
    the primary tier, which has none.
    """

    stored_bytes: int
    loaded_bytes: int
    skipped_blocks: int
    failed_blocks: int
    used_bytes: int | None
    capacity_bytes: int | None
    breaker: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """A replay at one moment; all numbers but `seconds` are counted from its start.

    Args:
        seconds: Since the start.
        requests: Requests whose lookups were answered.
        blocks: Blocks of these requests.
        hits: Those that were loaded, by tier.
        steps: Steps taken.
        tiers: Each tier, by name.
    """

    seconds: float
    requests: int
    blocks: int
    hits: Mapping[str, int]
    steps: int
    tiers: Mapping[str, TierSample]


@dataclass(slots=True)
class Sampler:
    """Takes samples of a replay between its steps. The thread of the replay uses it.

    Args:
        counters: Returns what the manager counts.
        clock: Seconds, from any moment on.
        samples: What was taken so far.
        step_s: Seconds of each step that was taken.
    """

    counters: Callable[[], Counted]
    clock: Callable[[], float] = time.monotonic
    samples: list[Sample] = field(default_factory=list)
    step_s: Sequence[float] = ()
    _interval_s: float = INTERVAL_S
    _next_s: float = 0.0
    _started_s: float = 0.0
    _tally: Tally | None = None

    def start(self) -> None:
        """Take the first sample; what follows is counted in seconds from here."""
        self._started_s = self.clock()
        self._take()

    def note(self, tally: Tally) -> None:
        """Take a sample if it is time for one. Call it after each step; it costs one look at the clock."""
        self._tally = tally
        if self.clock() - self._started_s >= self._next_s:
            self._take()

    def finish(self) -> None:
        """Take the last sample, once the last stores have ended."""
        self._take()
        if self._tally is not None:
            self.step_s = self._tally.step_s

    def _take(self) -> None:
        if len(self.samples) >= SAMPLES_MAX:
            del self.samples[1::2]
            self._interval_s *= 2
        seconds = self.clock() - self._started_s
        tally = self._tally or Tally(hits={})
        tiers = {name: _tier(counted) for name, counted in self.counters().items()}
        hits = dict(tally.hits)
        self.samples.append(Sample(seconds, tally.requests, tally.blocks, hits, len(tally.step_s), tiers))
        self._next_s = seconds + self._interval_s


def _tier(counted: Mapping[str, Any]) -> TierSample:
    """Return what the plots need of a tier's counters; a secondary tier tells its size by itself, under "tier"."""
    own = counted.get("tier", counted)
    return TierSample(
        counted.get("stored_bytes_total", 0),
        counted.get("loaded_bytes_total", 0),
        count_of(counted, "skipped_blocks_total"),
        count_of(counted, "failed_blocks_total"),
        _number(own.get("used_bytes")),
        _number(own.get("capacity_bytes")),
        _number(counted.get("breaker_state")),
    )


def _number(value: object) -> int | None:
    """Return a number that a stranger's tier may have told, or None."""
    return int(value) if is_finite(value) else None


def thinned(samples: Sequence[Sample], windows_max: int) -> Sequence[Sample]:
    """Return at most `windows_max` + 1 of the samples, evenly chosen, the first and the last among them."""
    windows = len(samples) - 1
    if windows <= windows_max:
        return samples
    return [samples[round(index * windows / windows_max)] for index in range(windows_max + 1)]
