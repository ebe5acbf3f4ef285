"""What a process holds, sample by sample, and whether it grows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MEMORY_GROWTH_MAX_BYTES = 32 << 20
HANDLES_SLACK = 32
"""Threads, and descriptors, that come and go with load and faults: connections, and files that are open at a moment.
What leaks with a job or a request comes to thousands."""
MEMORY_RISE_MAX_BYTES = 160 << 20
THREADS_RISE_MAX = 80
DESCRIPTORS_RISE_MAX = 320
"""What may be there at any moment beyond the first, however short the time. These were at most 60 MiB, 40 threads and
125 descriptors in a minute; a copy of each block that was moved would have been 280 MiB."""
SETTLED_S = 120.0
"""Pools and caches fill up in the first minute or two."""
JUDGED_S_MIN = 240.0
"""The shortest time after that from which growth is told from settling."""

LEFT_LIMIT_S = 60.0
"""How long after closing threads and descriptors have to go."""

_POINTS_MAX = 400
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds at a moment.

    Args:
        at_s: When, by `time.monotonic()`.
        rss_bytes: Resident memory, `proc_pid_statm(5)`.
        threads: Threads, those of libraries in C included.
        descriptors: Open file descriptors.
    """

    at_s: float
    rss_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls, foreign_descriptors: int = 0) -> Holdings:
        """Return what this process holds, without `foreign_descriptors`, which are not those of the stack."""
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
        threads = len(os.listdir("/proc/self/task"))
        descriptors = len(os.listdir("/proc/self/fd")) - 1 - foreign_descriptors  # without that of the listing
        return cls(time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE"), threads, descriptors)


def slope_per_s(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Return by how much `values` rise in a second: the median of the slopes between all pairs of points.

    That of Theil and Sen: bursts, and one step up or down, hardly move it (P. K. Sen, JASA 63, 1968).
    """
    stride = max(1, len(times_s) // _POINTS_MAX)
    x, y = np.asarray(times_s[::stride], dtype=np.float64), np.asarray(values[::stride], dtype=np.float64)
    first, second = np.triu_indices(len(x), 1)
    spans = x[second] - x[first]
    later = spans > 0
    return float(np.median((y[second] - y[first])[later] / spans[later])) if later.any() else 0.0


def growth_problems(samples: Sequence[Holdings], process: str) -> list[str]:
    """Return what of memory, threads and descriptors has grown, as sentences.

    The first third of the samples, and at least `SETTLED_S`, is settling. Where what follows is shorter than
    `JUDGED_S_MIN`, nothing is said.

    Args:
        samples: In the order of time.
        process: Whose they are.
    """
    if not samples:
        return []
    settled_s = samples[0].at_s + max(SETTLED_S, (samples[-1].at_s - samples[0].at_s) / 3)
    judged = [each for each in samples if each.at_s >= settled_s]
    if not judged or judged[-1].at_s - judged[0].at_s < JUDGED_S_MIN:
        return []
    span_s = judged[-1].at_s - judged[0].at_s
    times_s = [each.at_s for each in judged]
    found = []
    growth = slope_per_s(times_s, [each.rss_bytes for each in judged]) * span_s
    if growth > MEMORY_GROWTH_MAX_BYTES:
        found.append(
            f"memory of the {process} process grew by {growth / _MIB:.0f} MiB in {span_s:.0f} s, "
            f"{60 * growth / span_s / _MIB:.1f} MiB a minute"
        )
    half = len(judged) // 2
    for what in ("threads", "descriptors"):  # how many are in use at a moment varies; a leak raises all of them
        then, now = (statistics.median(getattr(each, what) for each in part) for part in (judged[:half], judged[half:]))
        if now > then + HANDLES_SLACK:
            found.append(f"{what} of the {process} process grew from {then:.0f} to {now:.0f}")
    return found


def rise_problems(samples: Sequence[Holdings], process: str) -> list[str]:
    """Return what has risen over the first of `samples` by more than it may at any moment, as sentences."""
    if not samples:
        return []
    found = []
    for what, unit, rise_max in (
        ("rss_bytes", "bytes of memory", MEMORY_RISE_MAX_BYTES),
        ("threads", "threads", THREADS_RISE_MAX),
        ("descriptors", "descriptors", DESCRIPTORS_RISE_MAX),
    ):
        first, most = getattr(samples[0], what), max(getattr(each, what) for each in samples)
        if most > first + rise_max:
            found.append(f"the {process} process rose from {first} to {most} {unit}, by {rise_max} allowed")
    return found


def left_problems(before: Holdings, now: Callable[[], Holdings], limit_s: float = LEFT_LIMIT_S) -> list[str]:
    """Return whether threads or descriptors are left, once they have had `limit_s` to go.

    Memory is not compared: what modules, and the allocator, have taken for themselves stays.

    Args:
        before: What the process held before its stack was opened.
        now: Tells what it holds at a moment after the stack was closed.
        limit_s: How long to wait.
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
