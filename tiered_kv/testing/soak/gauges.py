"""What is looked at during a soak: the process, the directories, and the manager's limits."""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np

from tiered_kv.testing.disk_use import occupied_bytes
from tiered_kv.testing.soak.grounds import FS_CAPACITY_BYTES, NVME_CAPACITY_BYTES, Grounds
from tiered_kv.tiering.manager import TieringOffloadingManager

JOB_GRACE_S = 10.0
"""How much later than its deadline a job may be reported: calls to storage have timeouts of their own, of a second."""
REQUESTS_MAX = 64
"""Of the replay's requests, those that the manager may remember at one time."""
RSS_GROWTH_MAX = 1.15
RSS_SLACK_BYTES = 32 << 20
HANDLES_SLACK = 32
"""Threads, and descriptors, that come and go with load and faults: connections, and files that are open at a moment.
What leaks with a job or a request comes to thousands."""
GROWTH_SAMPLES_MIN = 200
"""Samples of a third, two a second, from which on growth is judged: pools fill up in the first minute or two. What is
left when all is closed is judged however short the time was."""

HELD_UP_S = 2.0
"""Samples that are further apart tell of a machine, or a disk, that stood still; lateness counts from its end."""

_PROBLEMS_SHOWN = 20
_BUCKETS_PER_DECADE = 100


class Latencies:
    """Percentiles of any number of latencies, in little memory: counted in buckets that are 2.3 % wide."""

    def __init__(self) -> None:
        self._counts = np.zeros(9 * _BUCKETS_PER_DECADE, dtype=np.int64)  # from 0.1 µs to 100 s
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


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds.

    Args:
        rss_bytes: Resident memory, `proc_pid_statm(5)`.
        threads: Threads.
        descriptors: Open file descriptors, without those of the proxies: a server that is behind keeps connections open
            that its client has long closed.
    """

    rss_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls, grounds: Grounds) -> Holdings:
        """Return what it is now."""
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
        # Without that of the listing, and two for each connection of a proxy.
        proxied = sum(proxy.open_connections for proxy in (grounds.redis_proxy, grounds.s3_proxy))
        descriptors = len(os.listdir("/proc/self/fd")) - 1 - 2 * proxied
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), descriptors)


class Gauges:
    """Samples, and what was wrong in them. The manager's thread, but for `note`.

    Args:
        grounds: The directories.
        manager: The manager.
        processes: How many processes have nvme directories.

    Attributes:
        samples: What this process held, sample by sample.
        problems: What was wrong, as sentences, the first few.
        late_s_max: The most by which a job was reported after its deadline, as far as samples show.
        held_up_s_max: The longest time between two samples.
    """

    def __init__(self, grounds: Grounds, manager: TieringOffloadingManager, processes: int) -> None:
        self.samples: list[Holdings] = []
        self.problems: list[str] = []
        self.late_s_max = 0.0
        self.held_up_s_max = 0.0
        self._sampled_s = self._resumed_s = time.monotonic()
        self._grounds = grounds
        self._manager = manager
        self._processes = processes
        self._lock = threading.Lock()

    def note(self, problem: str) -> None:
        """Keep a problem; any thread."""
        with self._lock:
            if len(self.problems) < _PROBLEMS_SHOWN:
                self.problems.append(problem)

    def sample(self) -> None:
        """Look at everything once."""
        self._note_time()
        self.samples.append(Holdings.now(self._grounds))
        self._look_at_directories()
        self._look_at_limits()
        self._look_at_jobs()
        self._note_time()  # a disk that hangs holds up those who look at its directories, too

    def judge_growth(self) -> tuple[int, int]:
        """Compare the last third of the samples with the one before; the first is warming up.

        Returns:
            The median of resident memory in the two thirds, in bytes.
        """
        third = len(self.samples) // 3
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        if not middle:
            return 0, 0
        rss = [int(statistics.median(each.rss_bytes for each in samples)) for samples in (middle, last)]
        if rss[1] > RSS_GROWTH_MAX * rss[0] + RSS_SLACK_BYTES:
            self.note(f"memory grew from {rss[0] / 2**20:.0f} MiB to {rss[1] / 2**20:.0f} MiB")
        if third < GROWTH_SAMPLES_MIN:
            return rss[0], rss[1]
        for what in ("threads", "descriptors"):  # how many are in use at a moment varies; a leak raises all of them
            then, now = (statistics.median(getattr(each, what) for each in samples) for samples in (middle, last))
            if now > then + HANDLES_SLACK:
                self.note(f"{what} grew from {then:.0f} to {now:.0f}")
        return rss[0], rss[1]

    def _look_at_directories(self) -> None:
        for process in range(self._processes):
            used_bytes = occupied_bytes(self._grounds.nvme_directory(process))
            if used_bytes > NVME_CAPACITY_BYTES:
                self.note(f"nvme directory {process} occupies {used_bytes} of {NVME_CAPACITY_BYTES} bytes")
        used_bytes = occupied_bytes(self._grounds.fs_directory)
        if used_bytes > FS_CAPACITY_BYTES:
            self.note(f"the fs directory occupies {used_bytes} of {FS_CAPACITY_BYTES} bytes")

    def _look_at_limits(self) -> None:
        for lane in self._manager._lanes:
            if lane.store_blocks > lane.store_blocks_max:
                self.note(f"tier {lane.name} has stores of {lane.store_blocks} blocks, {lane.store_blocks_max} allowed")
            load_blocks = lane.load_blocks + lane.load_blocks_reserved
            if load_blocks > lane.load_blocks_max:
                self.note(f"tier {lane.name} has loads of {load_blocks} blocks, {lane.load_blocks_max} allowed")
            if len(lane.jobs) > lane.store_blocks_max + lane.load_blocks_max:
                self.note(f"tier {lane.name} has {len(lane.jobs)} jobs")
        promotions = self._manager._promotions
        if promotions.blocks_taken > promotions._blocks_max:
            self.note(f"{promotions.blocks_taken} blocks are being promoted or held, {promotions._blocks_max} allowed")
        requests = sum(1 for _ in self._manager._requests)
        if requests > REQUESTS_MAX:
            self.note(f"the manager remembers {requests} requests")

    def _note_time(self) -> None:
        now_s = time.monotonic()
        gap_s, self._sampled_s = now_s - self._sampled_s, now_s
        self.held_up_s_max = max(self.held_up_s_max, gap_s)
        if gap_s > HELD_UP_S:
            self._resumed_s = now_s

    def _look_at_jobs(self) -> None:
        now_s = time.monotonic()
        for lane in self._manager._lanes:
            for job in lane.jobs.values():
                late_s = now_s - max(job.deadline_s, self._resumed_s)
                self.late_s_max = max(self.late_s_max, late_s)
                if late_s > JOB_GRACE_S:
                    what = "load" if job.is_promotion else "store"
                    self.note(f"{what} {job.job_id} of tier {lane.name} is {late_s:.1f} s over its deadline")
