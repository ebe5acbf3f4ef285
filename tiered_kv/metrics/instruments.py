"""Instruments: counters, with functions to read them, histograms, notices for an operator, a timer of steps.

A counter's name ends with its unit, followed by `_total` if it only grows. Directions and reasons are labels: such a
counter is a dictionary by the first label, then by the next.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

LABELS_MAX: Final = 64
"""Limit of label combinations of one counter: some labels are words from storage, or from third-party tiers."""
OTHER: Final = "other"
"""Replaces the last label of events beyond this limit."""
SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets of jobs."""
SHORT_SECONDS: Final = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, *SECONDS)
"""Buckets of lookups and steps. The shortest lookup is one in a dictionary."""
BYTES: Final = tuple(float(4 << 10 << shift) for shift in range(0, 20, 2))
"""Buckets of jobs' sizes: 4 KiB to 1 GiB, by factors of four."""
INFINITY: Final = "+Inf"
"""The last bucket."""
NOTICES_MAX: Final = 64
"""Pairs of a tier and a change; of more, the latest are kept."""
EVERY_STEPS: Final = 128
"""One step in so many is timed."""
P = ParamSpec("P")
T = TypeVar("T")


class Counters:
    """Counts events by name and labels. Any thread may call.

    A plugin returns `snapshot()` from its tier's `stats`. `metrics/vocabulary.py` describes the built-in tiers' names.

    Args:
        names: Counters without labels. They begin with 0.
        labelled: Counters with labels. A combination of labels appears with its first event. Beyond `LABELS_MAX`
            combinations, the last label of a new one is `OTHER`.
    """

    def __init__(self, names: Iterable[str], labelled: Iterable[str] = ()) -> None:
        self._counts: dict[tuple[str, ...], int] = {(name,): 0 for name in names}
        self._labelled = dict.fromkeys(labelled, 0)  # how many combinations of labels each has
        self._lock = threading.Lock()

    def add(self, name: str, *labels: str, count: int = 1) -> None:
        """Count `count` events; raises `KeyError` for an unknown name, or labels that are missing or not expected."""
        path = (name, *labels)
        with self._lock:
            if path not in self._counts:
                if not labels or name not in self._labelled:
                    raise KeyError(name)
                if self._labelled[name] < LABELS_MAX:
                    self._labelled[name] += 1
                else:
                    path = (name, *labels[:-1], OTHER)
            self._counts[path] = self._counts.get(path, 0) + count

    def __getitem__(self, name: str) -> int:
        """Return a counter without labels."""
        return self._counts[name,]

    def snapshot(self) -> dict[str, Any]:  # Any: a number, or a dictionary of them by label
        """Return all counters by name; a counter with labels is a dictionary by label, empty before its first event."""
        with self._lock:
            counts = list(self._counts.items())
        nested: dict[str, Any] = {name: {} for name in self._labelled}
        for (*above, last), count in counts:
            inner = nested
            for step in above:
                inner = inner.setdefault(step, {})
            inner[last] = count
        return nested


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


class Histogram:
    """Counts of values by size. One thread adds, any thread may read.

    Args:
        bounds: The largest value of each bucket, rising. A further bucket has all larger values.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:  # Any: a number, or numbers by bucket
        """Return `sum`, `count`, and `buckets`: the number of values in each, by its largest value."""
        counts, total = self._counts.copy(), self._sum
        names = [*map(repr, self._bounds), INFINITY]
        return {"sum": total, "count": sum(counts), "buckets": dict(zip(names, counts, strict=True))}


def is_histogram(value: object) -> bool:
    """Return whether a value of counters is the snapshot of a histogram."""
    return isinstance(value, Mapping) and isinstance(value.get("buckets"), Mapping)


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


class Notices:
    """One notice for each tier and change. Any thread may add and read.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._notices: dict[tuple[str, str], tuple[float, int]] = {}  # the last time and the count; the latest last

    def add(self, tier: str, what: str, count: int = 1) -> None:
        """Note a change that happened `count` times in a tier.

        `what` holds no key, path or text from elsewhere.
        """
        with self._lock:
            _, before = self._notices.pop((tier, what), (0.0, 0))
            self._notices[tier, what] = self._clock(), before + count
            if len(self._notices) > NOTICES_MAX:
                del self._notices[next(iter(self._notices))]

    def snapshot(self) -> list[dict[str, object]]:
        """Return the notices, the oldest first: `time` (of the last, since 1970), `tier`, `what` and `count`."""
        with self._lock:
            notices = list(self._notices.items())
        return [
            {"time": last_s, "tier": tier, "what": what, "count": count} for (tier, what), (last_s, count) in notices
        ]


class StepTimer:
    """Adds up the time of one step's calls in `EVERY_STEPS`. Owned by the manager's thread; any may read `seconds`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = Histogram(SHORT_SECONDS)
        self.clock = clock
        self.is_on = False
        self.spent_s = 0.0
        self._steps_left = EVERY_STEPS

    def end_step(self, began_s: float) -> None:
        """Note the end of a step, whose last call began at `began_s`."""
        if self.is_on:
            self.seconds.add(self.spent_s + self.clock() - began_s)
            self.spent_s = 0.0
        self._steps_left -= 1
        self.is_on = self._steps_left == 0
        if self.is_on:
            self._steps_left = EVERY_STEPS


def timed(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Time a method in these steps; its object has a `step_timer`. A timed method that it calls is not counted twice.

    A `lookup` of one key is not timed: reading the clock takes longer than the call.
    """

    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **named: P.kwargs) -> T:  # Any: the manager's module imports this one
        timer: StepTimer = self.step_timer
        if not timer.is_on:
            return method(self, *arguments, **named)
        timer.is_on, began_s = False, timer.clock()
        try:
            return method(self, *arguments, **named)
        finally:
            timer.is_on, timer.spent_s = True, timer.spent_s + timer.clock() - began_s

    return call
