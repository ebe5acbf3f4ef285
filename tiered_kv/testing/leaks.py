"""Detection of what code leaves behind in its process: threads, file descriptors, shared memory, files.

    before = Footprint.take(temporary_directory)
    ...
    left = Footprint.take(temporary_directory).beyond(before)

A footprint takes about a tenth of a millisecond, so that a fixture can take two for every test.
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
_DESCRIPTORS = "/proc/self/fd"
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources of a process at one moment."""

    threads: frozenset[threading.Thread]  # that are alive
    shared_memory: frozenset[Path]  # files in /dev/shm
    others: frozenset[str]  # open file descriptors and temporary files, as lines for a person

    @classmethod
    def take(cls, temporary_directory: Path) -> Self:
        """Return this process's footprint now; `temporary_directory` is where it has its temporary files."""
        temporary = os.listdir(temporary_directory) if temporary_directory.exists() else ()
        others = {f"temporary file {name}" for name in temporary} | _open_descriptors()
        return cls(frozenset(threading.enumerate()), _shared_memory(), frozenset(others))

    def beyond(self, before: Footprint) -> list[str]:
        """Return, as readable lines, what this footprint has beyond `before`."""
        left = [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        new = self.shared_memory - before.shared_memory
        # A neighbour's memory is no leak of ours.
        left += [f"shared memory {path}" for path in new if not _used_by_another_process(path)]
        return sorted(left) + sorted(self.others - before.others)


def left_behind(before: Footprint, temporary_directory: Path, grace_s: float = 10.0) -> list[str]:
    """Return what is left beyond `before`, after waiting at most `grace_s` for threads that are about to end.

    A thread that a tier's shutdown did not wait for ends by itself, and on a busy machine late.
    """
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
            found.add(f"file descriptor {fd} of {os.readlink(f'{_DESCRIPTORS}/{fd}')}")
    return found


def _shared_memory() -> frozenset[Path]:
    """Return the files, but for semaphores and what engines and `multiprocessing` make, which are other programs'."""
    if not _SHARED_MEMORY.exists():
        return frozenset()
    with os.scandir(_SHARED_MEMORY) as entries:
        files = (entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        return frozenset(_SHARED_MEMORY / name for name in files if not name.startswith(_OTHERS))


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
