"""Writes that take fewer bytes than they were given.

strace(1) cannot shorten a call. So `os.write` and the like are replaced in the process that writes.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

_NAMES: Final = ("write", "pwrite", "writev", "pwritev")


class ShortWrites:
    """Shortens one write of a process below a path: the one with the number `at`, from 0, of those that can be short.

    Half of the bytes are written; of a direct write half of the pages, as direct I/O takes whole pages only (open(2),
    O_DIRECT). A direct write of one page and a write of one byte are neither counted nor shortened.

    `count` and `was_hit` are in memory that a forked child shares. Any thread may write.
    """

    def __init__(self, path: str, at: int, *, ends: bool) -> None:
        self._path = path
        self._at = at
        self._ends = ends
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)  # count, and whether one was shortened
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in _NAMES}

    @property
    def count(self) -> int:
        """Writes that can be short."""
        return int.from_bytes(self._shared[:8], "little")

    @property
    def was_hit(self) -> bool:
        return self._shared[8] != 0

    def around(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work` with the short write; called in a child, whose calls stay replaced."""

        def short_work() -> None:
            for name in _NAMES:
                setattr(os, name, functools.partial(self.write, name))
            work()

        return short_work

    def write(self, name: str, fd: int, data: Any, *rest: Any) -> int:  # Any: as the four calls take it
        call = self._real[name]
        parts = [memoryview(part).cast("B") for part in (data if name.endswith("v") else [data])]
        keep = kept_bytes(fd, sum(map(len, parts)))
        if not keep or not os.readlink(f"/proc/self/fd/{fd}").startswith(self._path):
            return int(call(fd, data, *rest))
        with self._lock:
            number = self.count
            self._shared[:8] = (number + 1).to_bytes(8, "little")
        if number != self._at:
            return int(call(fd, data, *rest))
        kept: list[memoryview] = []
        for part in parts:
            kept.append(part[:keep])
            keep -= len(kept[-1])
        written = int(call(fd, kept if name.endswith("v") else b"".join(kept), *rest))
        self._shared[8] = 1
        if self._ends:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def kept_bytes(fd: int, size_bytes: int) -> int:
    """Return the size of a write of `size_bytes` that is shortened; 0 if it cannot be."""
    half_bytes = size_bytes // 2
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return half_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    return half_bytes
