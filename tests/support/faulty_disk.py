"""A disk for nvme stores whose calls fail or wait."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

from tiered_kv.testing.gate import Gate
from tiered_kv_nvme.disk import Disk

Interfere = Callable[[Sequence[memoryview], int], int | None]
"""Called with buffers and offset before a call; may raise, wait, or return a limit of bytes."""


def in_peace(buffers: Sequence[memoryview], offset: int) -> int | None:
    return None


class FaultyDisk(Disk):
    """A disk that calls a hook before each call.

    Attributes:
        on_write, on_read: May raise, wait, or return a limit of bytes.
        on_allocate, on_flush: May raise.
    """

    def __init__(self) -> None:
        self.on_write: Interfere = in_peace
        self.on_read: Interfere = in_peace
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
