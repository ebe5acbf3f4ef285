"""What is looked at during a soak: the process, the directories, and the manager's limits."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.support.disk_use import occupied_beyond
from tests.support.soak.grounds import FS_CAPACITY_BYTES, NVME_CAPACITY_BYTES, Grounds
from tests.support.soak.holdings import Holdings
from tests.support.soak.limits import LimitsWatch
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
            path = self._grounds.nvme_directory(process)
            self._look_at_directory(path, f"nvme directory {process}", NVME_CAPACITY_BYTES)
        self._look_at_directory(self._grounds.fs_directory, "the fs directory", FS_CAPACITY_BYTES)

    def _look_at_directory(self, path: Path, name: str, capacity_bytes: int) -> None:
        if used_bytes := occupied_beyond(path, capacity_bytes):
            self.note(f"{name} occupies {used_bytes} of {capacity_bytes} bytes")
