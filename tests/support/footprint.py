"""What a test must not leave behind: threads, descriptors, memory and files.

before = Footprint.take(temporary_directory)
...
left = left_behind(before, temporary_directory)
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SHARED_MEMORY = Path("/dev/shm")
_OTHERS = ("sem.", "vllm_", "sglang_", "psm_")
"""Semaphores, and files of engines and of `multiprocessing`."""
_DESCRIPTORS = "/proc/self/fd"
_OF_A_DRIVER = "/dev/nvidia"
"""NVIDIA's driver opens these when it is used in a new way, and keeps them until the process ends."""
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources of this process at one moment; taking it costs about a tenth of a millisecond."""

    threads: frozenset[threading.Thread]  # that are alive
    shared_memory: frozenset[str]  # names in /dev/shm
    others: frozenset[str]  # open file descriptors and temporary files, as lines for a person

    @classmethod
    def take(cls, temporary_directory: Path) -> Self:
        """Return the footprint now; `temporary_directory` has the temporary files of this process."""
        temporary = os.listdir(temporary_directory) if temporary_directory.exists() else ()
        others = {f"temporary file {name}" for name in temporary} | _open_descriptors()
        shared = os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.exists() else ()
        return cls(frozenset(threading.enumerate()), frozenset(shared), frozenset(others))

    def beyond(self, before: Footprint) -> list[str]:
        """Return the resources that `before` does not have, as lines of text."""
        left = [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        names = self.shared_memory - before.shared_memory
        new = [_SHARED_MEMORY / name for name in names if not name.startswith(_OTHERS)]
        left += [f"shared memory {path}" for path in new if path.is_file() and not _used_by_another_process(path)]
        return sorted(left) + sorted(self.others - before.others)


def left_behind(before: Footprint, temporary_directory: Path, grace_s: float = 10.0) -> list[str]:
    """Return the resources beyond `before`, after waiting at most `grace_s` for threads that are about to end."""
    end = time.monotonic() + grace_s
    while left := Footprint.take(temporary_directory).beyond(before):
        if time.monotonic() >= end:
            return left
        time.sleep(_POLL_S)
    return []


def _open_descriptors() -> set[str]:
    found = set()
    for fd in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile: the listing's own descriptor, or a thread's
            target = os.readlink(f"{_DESCRIPTORS}/{fd}")
            if not target.startswith(_OF_A_DRIVER):
                found.add(f"file descriptor {fd} of {target}")
    return found


def _used_by_another_process(path: Path) -> bool:
    own = str(os.getpid())
    for process in filter(str.isdigit, os.listdir("/proc")):
        if process == own:
            continue
        try:
            if str(path) in Path(f"/proc/{process}/maps").read_text(errors="replace"):
                return True
            with os.scandir(f"/proc/{process}/fd") as descriptors:
                if any(os.readlink(each) == str(path) for each in descriptors):
                    return True
        except OSError:  # it ended, or belongs to another user
            continue
    return False
