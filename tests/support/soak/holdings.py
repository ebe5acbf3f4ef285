"""Resources of a process, sample by sample, and whether they grow."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SETTLED_S = 120.0
"""Pools and caches fill up in the first minute or two."""
JUDGED_S_MIN = 240.0
"""The shortest time after that in which growth differs from settling."""
LEFT_LIMIT_S = 60.0
"""How long after closing threads and descriptors have to go."""


class _Bound(NamedTuple):
    """Allowed growth: at any moment over the first sample, and once settled from one half to the next."""

    unit: str
    rise_max: int
    growth_max: int


_BOUNDS = {
    "rss_bytes": _Bound("bytes of memory", 160 << 20, 24 << 20),
    # Connections vary with load and faults. A leak with each job or request reaches thousands.
    "threads": _Bound("threads", 80, 32),
    "descriptors": _Bound("descriptors", 320, 32),
}
"""A minute brought at most 60 MiB, 40 threads and 125 descriptors; a copy of each moved block would be 280 MiB."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources of a process at a moment of `time.monotonic()`: resident memory, threads, open descriptors."""

    at_s: float
    rss_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls, foreign_descriptors: int = 0) -> Holdings:
        """Return the resources of this process, without descriptors of other parts of the test."""
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
        threads = len(os.listdir("/proc/self/task"))
        descriptors = len(os.listdir("/proc/self/fd")) - 1 - foreign_descriptors  # without that of the listing
        return cls(time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE"), threads, descriptors)


def growth_problems(samples: Sequence[Holdings]) -> list[str]:
    """Return which resources have risen at any moment, or grown once settled, by more than allowed.

    Growth is from the median of one half of the time to that of the next, which bursts and noise hardly change.
    """
    if not samples:
        return []
    settled_s = samples[0].at_s + max(SETTLED_S, (samples[-1].at_s - samples[0].at_s) / 3)
    judged = [each for each in samples if each.at_s >= settled_s]
    is_judged = bool(judged) and judged[-1].at_s - judged[0].at_s >= JUDGED_S_MIN
    half = len(judged) // 2
    found = []
    for name, bound in _BOUNDS.items():
        first, most = getattr(samples[0], name), max(getattr(each, name) for each in samples)
        if most > first + bound.rise_max:
            found.append(f"it rose from {first} to {most} {bound.unit}, by {bound.rise_max} allowed")
        if is_judged:
            then, now = (statistics.median(getattr(each, name) for each in p) for p in (judged[:half], judged[half:]))
            if now > then + bound.growth_max:
                found.append(f"it grew from {then:.0f} to {now:.0f} {bound.unit}")
    return found


def left_problems(before: Holdings, now: Callable[[], Holdings], limit_s: float = LEFT_LIMIT_S) -> list[str]:
    """Return whether threads or descriptors are left after `limit_s`.

    Memory is not compared: modules and the allocator keep some.
    """
    end_s = time.monotonic() + limit_s
    while True:
        left = now()
        if left.threads <= before.threads and left.descriptors <= before.descriptors:
            return []
        if time.monotonic() >= end_s:
            return [
                f"after closing there are {left.threads} threads and {left.descriptors} descriptors, "
                f"before opening there were {before.threads} and {before.descriptors}"
            ]
        time.sleep(0.05)
