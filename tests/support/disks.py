"""Disks for nvme stores: one whose calls fail or wait, and one that checks the order of writes and flushes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

from tests.support.faulty import Gate
from tiered_kv_nvme.disk import Disk

Interfere = Callable[[Sequence[memoryview], int], int | None]
"""Called with buffers and offset before a call; may raise, wait, or return a limit of bytes."""


def without_faults(buffers: Sequence[memoryview], offset: int) -> int | None:
    return None


class FaultyDisk(Disk):
    """A disk that calls a hook before each call.

    Attributes:
        on_write, on_read: May raise, wait, or return a limit of bytes.
        on_allocate, on_flush: May raise.
    """

    def __init__(self) -> None:
        self.on_write: Interfere = without_faults
        self.on_read: Interfere = without_faults
        self.on_allocate: Callable[[], object] = lambda: None
        self.on_flush: Callable[[], object] = lambda: None

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, _limited(buffers, self.on_write(buffers, offset)), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, _limited(buffers, self.on_read(buffers, offset)), offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        self.on_allocate()
        super().fallocate(fd, size_bytes)

    def datasync(self, fd: int) -> None:
        self.on_flush()
        super().datasync(fd)


class BadPlaces(FaultyDisk):
    """A disk that refuses transfers of some places. Any thread may call.

    Attributes:
        reads, writes: The bad places: a segment's slot, the first byte and the one behind the last.
        code: The error number.
    """

    def __init__(self, code: int = errno.EIO) -> None:
        super().__init__()
        self.code = code
        self.reads: list[tuple[int, int, int]] = []
        self.writes: list[tuple[int, int, int]] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(self.reads, fd, buffers, offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(self.writes, fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def _check(self, bad: list[tuple[int, int, int]], fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) if bad else ""
        if name.startswith("segment-"):
            slot, end = int(name[-9:-3]), offset + sum(map(len, buffers))
            if any(slot == at and offset < last and first < end for at, first, last in bad):
                raise OSError(self.code, os.strerror(self.code))


def _limited(buffers: Sequence[memoryview], limit: int | None) -> list[memoryview]:
    if limit is None:
        return list(buffers)
    limited: list[memoryview] = []
    for buffer in buffers:
        if limit <= 0:
            break
        limited.append(buffer[:limit])
        limit -= len(buffer)
    return limited


def fail(code: int, offsets: Sequence[int] | None = None) -> Interfere:
    """Return a hook that fails calls with an error, at some offsets or everywhere."""

    def raise_error(buffers: Sequence[memoryview], offset: int) -> int | None:
        if offsets is None or offset in offsets:
            raise OSError(code, os.strerror(code))
        return None

    return raise_error


def hold(gate: Gate, thread: str) -> Interfere:
    """Return a hook that blocks the calls of one thread at a gate."""

    def wait(buffers: Sequence[memoryview], offset: int) -> int | None:
        if threading.current_thread().name == thread:
            gate.pass_through()
        return None

    return wait


def full_after(allocations: int) -> Callable[[], None]:
    """Return a hook that refuses allocations after some, as a full file system does."""
    allowed = iter(range(allocations))

    def allocate() -> None:
        if next(allowed, None) is None:
            raise OSError(errno.ENOSPC, "injected")

    return allocate


class FlushOrder(Disk):
    """A disk that notes the unflushed writes of each file. Any thread may call.

    A device may write unflushed data in any order; an ext4 image that is shut down shows little of that.

    A write is a problem if data must be on the device before it and is not flushed. The rules are those of
    `tiered_kv_nvme.segment` and `formats-nvme.md`. The offset identifies the data: the header is at 0, a summary
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
