"""Detection of what code leaves behind in its process: threads, file descriptors, shared memory, files.

    before = Footprint.take(temporary_directory)
    ...
    left = Footprint.take(temporary_directory).beyond(before)

A footprint takes about a tenth of a millisecond, so that a fixture can take two for every test.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SHARED_MEMORY = Path("/dev/shm")
_SEMAPHORE = "sem."
"""Prefix of the names of POSIX semaphores. This project has none; other programs make and remove them."""
_DESCRIPTORS = "/proc/self/fd"
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources of a process at one moment.

    Args:
        threads: Python threads that are alive, by identity.
        descriptors: Open file descriptors with what each refers to.
        shared_memory: Names of files in /dev/shm, without directories, which are other programs' temporary ones.
        temporary: Names in the directory that the process uses for temporary files.
    """

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]
    shared_memory: frozenset[str]
    temporary: frozenset[str]

    @classmethod
    def take(cls, temporary_directory: Path) -> Self:
        """Return this process's footprint now."""
        return cls(
            threads=frozenset(threading.enumerate()),
            descriptors=_open_descriptors(),
            shared_memory=_shared_memory(),
            temporary=_names_in(temporary_directory),
        )

    def beyond(self, before: Footprint) -> list[str]:
        """Return, as readable lines, what this footprint has beyond `before`."""
        left = [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        left += [f"file descriptor {fd} of {target}" for fd, target in self.descriptors - before.descriptors]
        left += [f"shared memory {_SHARED_MEMORY / name}" for name in self._own_shared_memory(before)]
        left += [f"temporary file {name}" for name in self.temporary - before.temporary]
        return sorted(left)

    def _own_shared_memory(self, before: Footprint) -> list[str]:
        """Return the new names that no other process uses: those would be no leak of this process."""
        new = self.shared_memory - before.shared_memory
        return [name for name in new if not _used_by_another_process(_SHARED_MEMORY / name)] if new else []


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


def _open_descriptors() -> frozenset[tuple[str, str]]:
    found = set()
    for fd in os.listdir(_DESCRIPTORS):
        try:
            found.add((fd, os.readlink(f"{_DESCRIPTORS}/{fd}")))
        except FileNotFoundError:  # closed meanwhile: the descriptor of the listing, or of another thread
            continue
    return frozenset(found)


def _shared_memory() -> frozenset[str]:
    try:
        with os.scandir(_SHARED_MEMORY) as entries:
            files = (entry.name for entry in entries if entry.is_file(follow_symlinks=False))
            return frozenset(name for name in files if not name.startswith(_SEMAPHORE))
    except FileNotFoundError:
        return frozenset()


def _names_in(directory: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(directory))
    except FileNotFoundError:
        return frozenset()


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
