"""What is looked at during a soak: the process, the directories, and the manager's limits."""

from __future__ import annotations

import threading

from tiered_kv.testing.disk_use import occupied_bytes
from tiered_kv.testing.soak.grounds import FS_CAPACITY_BYTES, NVME_CAPACITY_BYTES, Grounds
from tiered_kv.testing.soak.holdings import Holdings
from tiered_kv.testing.soak.limits import LimitsWatch
from tiered_kv.tiering.manager import TieringOffloadingManager

PROBLEMS_SHOWN = 20


class Gauges:
    """Samples, and what was wrong in them. The manager's thread, but for `note`.

    Args:
        grounds: The directories.
        manager: The manager.
        processes: How many processes have nvme directories.

    Attributes:
        samples: What this process held, sample by sample.
        problems: What was wrong, as sentences, the first few.
        limits: What looks at the manager and its tiers.
    """

    def __init__(self, grounds: Grounds, manager: TieringOffloadingManager, processes: int) -> None:
        self.samples: list[Holdings] = []
        self.problems: list[str] = []
        self.limits = LimitsWatch(manager)
        self._grounds = grounds
        self._processes = processes
        self._lock = threading.Lock()

    def note(self, problem: str) -> None:
        """Keep a problem; any thread."""
        with self._lock:
            if len(self.problems) < PROBLEMS_SHOWN:
                self.problems.append(problem)

    def sample(self) -> None:
        """Look at everything once."""
        self.limits.note_time()
        self.samples.append(Holdings.now(self._grounds.foreign_descriptors))
        self._look_at_directories()
        for problem in self.limits.problems():
            self.note(problem)
        self.limits.note_time()

    def _look_at_directories(self) -> None:
        for process in range(self._processes):
            used_bytes = occupied_bytes(self._grounds.nvme_directory(process))
            if used_bytes > NVME_CAPACITY_BYTES:
                self.note(f"nvme directory {process} occupies {used_bytes} of {NVME_CAPACITY_BYTES} bytes")
        used_bytes = occupied_bytes(self._grounds.fs_directory)
        if used_bytes > FS_CAPACITY_BYTES:
            self.note(f"the fs directory occupies {used_bytes} of {FS_CAPACITY_BYTES} bytes")
