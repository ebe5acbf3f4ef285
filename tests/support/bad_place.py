"""A place of a file that goes bad while a process writes: the disk refuses it from then on, and takes all others."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

_WRITES: Final = ("pwrite", "pwritev", "write", "writev")
_READS: Final = ("pread", "preadv", "read", "readv")


@dataclass(frozen=True, slots=True)
class BadPlace:
    """The place of one write of a run, by the number of the write below the tier's path, from 0."""

    write: int
    refuses: Literal["reads", "writes"]
    code: str = "EIO"

    def __str__(self) -> str:
        return f"{self.refuses} of the place of write {self.write}: {self.code}"


class PlaceGoesBad:
    """Replaces `os.pwritev` and the like in the process that writes. Any thread may call them.

    `was_hit` is in memory that a forked child shares.
    """

    def __init__(self, path: str, bad: BadPlace) -> None:
        self._path = path
        self._bad = bad
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self._lock = threading.Lock()
        self._writes = 0
        self._place: tuple[str, int, int] | None = None  # the file, the first byte and the one behind the last

    @property
    def was_hit(self) -> bool:
        """Whether a call was refused."""
        return self._shared[0] != 0

    def around(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work` with the bad place; called in a child, whose calls stay replaced."""

        def bad_work() -> None:
            for name in (*_WRITES, *_READS):
                setattr(os, name, functools.partial(self._call, name, getattr(os, name)))
            work()

        return bad_work

    def _call(self, name: str, real: Callable[..., Any], fd: int, data: Any, *rest: Any) -> Any:  # Any: as the calls
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.startswith(self._path):
            return real(fd, data, *rest)
        if isinstance(data, int):
            size = data
        else:
            size = sum(memoryview(part).nbytes for part in (data if name.endswith("v") else [data]))
        begin = rest[0] if name.startswith("p") else os.lseek(fd, 0, os.SEEK_CUR)
        with self._lock:
            if name in _WRITES:
                self._writes += 1
                if self._writes == self._bad.write + 1:
                    self._place = path, begin, begin + size
            place, refused = self._place, name in (_WRITES if self._bad.refuses == "writes" else _READS)
        if refused and place is not None and path == place[0] and begin < place[2] and place[1] < begin + size:
            self._shared[0] = 1
            code = getattr(errno, self._bad.code)
            raise OSError(code, os.strerror(code))
        return real(fd, data, *rest)
