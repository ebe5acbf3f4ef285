"""The order in which nvme's segment files are written and flushed, compared with what survives a power failure.

A device may write unflushed data in any order; an ext4 image that is shut down shows little of that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from tiered_kv_nvme.disk import Disk


class FlushOrder(Disk):
    """A disk that notes what each file was given since its last flush. Any thread may call.

    A write is a problem if data must be on the device before it and is not flushed. The rules are those of
    `tiered_kv_nvme.files` and `formats-nvme.md`. The offset identifies the data: the header is at 0, a summary
    ends where the file does, all else are batches.

    - A batch comes after its segment's header is on the device. Otherwise the header of the use before may stand over
      it, and that use's summary may be taken for what the file holds.
    - A summary comes after all batches are on the device. Otherwise it may list payloads that are not there.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.headers = self.batches = self.summaries = 0
        self._lock = threading.Lock()
        self._unflushed: dict[int, set[str]] = {}  # by inode: what was written since the last flush

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        status = os.fstat(fd)
        end = offset + sum(map(len, buffers))
        with self._lock:
            unflushed = self._unflushed.setdefault(status.st_ino, set())
            if offset == 0:
                self.headers += 1
                unflushed.add("header")
            elif end == status.st_size:
                self.summaries += 1
                self._expect_none(fd, "summary", unflushed)
            else:
                self.batches += 1
                self._expect_none(fd, "batch", unflushed & {"header"})
                unflushed.add("batch")
        return super().pwritev(fd, buffers, offset)

    def datasync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        with self._lock:
            pending = self._unflushed.get(inode, set())
            flushed, self._unflushed[inode] = pending, set()
        try:
            super().datasync(fd)
        except OSError:
            with self._lock:
                self._unflushed[inode] |= flushed
            raise

    def _expect_none(self, fd: int, what: str, unflushed: set[str]) -> None:
        if unflushed:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            self.problems.append(f"{name}: a {what} is written before the {' and '.join(sorted(unflushed))} is flushed")
