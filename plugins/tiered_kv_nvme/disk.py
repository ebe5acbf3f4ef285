"""System calls on open files, and the memory they need.

`Disk` is the interface between the engine and the operating system: every transfer, allocation and flush of a
segment goes through one. So a test can pass a disk that fails, stalls or does half the work.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tiered_kv.tiering.step import give_way
from tiered_kv.toolkit.small_files import remove, rest_of
from tiered_kv_nvme.layout import PAGE_BYTES

OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
FILE_MODE = 0o600

PROBE_NAME = "probe.tmp"
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_HUGE_PAGE_BYTES = 2 << 20
"""A disk takes a large request at once if its memory is in huge pages, and in pieces of about 1 MiB if not."""


class Disk:
    """The system calls of the engine; each may be called by any thread.

    A thread that comes back from a transfer gives way to a scheduler's step. So no caller holds a lock.
    """

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write `buffers` at `offset` and return how many bytes were written, perhaps fewer than asked."""
        written = os.pwritev(fd, buffers, offset)
        give_way()
        return written

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read from `offset` into `buffers` and return how many bytes came, 0 at the end of the file."""
        came = os.preadv(fd, buffers, offset)
        give_way()
        return came

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Give the file `size_bytes` of the file system's space; ENOSPC if there is not that much."""
        os.posix_fallocate(fd, 0, size_bytes)

    def datasync(self, fd: int) -> None:
        """Wait until the written bytes are on the device."""
        os.fdatasync(fd)


def write_fully(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of `buffers` at `offset`, continuing after short writes.

    Raises:
        OSError: The disk failed, or wrote no byte; some of the bytes may have been written.
    """
    total = sum(map(len, buffers))
    done = disk.pwritev(fd, buffers, offset)
    while done < total:
        written = disk.pwritev(fd, rest_of(buffers, done), offset + done)
        if written <= 0:
            raise OSError(errno.EIO, f"the disk took {done} of {total} bytes")
        done += written


def read_fully(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` from `offset`, continuing after short reads; return how many bytes came before the file's end.

    Raises:
        OSError: The disk failed.
    """
    total = sum(map(len, buffers))
    done = disk.preadv(fd, buffers, offset)
    while 0 < done < total:
        came = disk.preadv(fd, rest_of(buffers, done), offset + done)
        if came <= 0:
            break
        done += came
    return done


def is_of_alignment(error: OSError) -> bool:
    """Return whether a direct transfer failed as it does where its memory is not aligned."""
    return error.errno == errno.EINVAL


class Scratch(threading.local):
    """A page-aligned buffer for each calling thread, which grows to what the thread needs."""

    def __init__(self) -> None:
        self._memory = _map(PAGE_BYTES)

    def take(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` of this thread's buffer, with the bytes of the last use."""
        if size_bytes > len(self._memory):
            self._memory = _map(1 << (size_bytes - 1).bit_length())
        return self._memory[:size_bytes]


def _map(size_bytes: int) -> memoryview:
    """Return fresh memory, in huge pages where it is large enough and the kernel has them."""
    if size_bytes < _HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, size_bytes, flags=_PRIVATE))
    mapping = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=_PRIVATE)
    with suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(mapping, dtype=np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    return memoryview(mapping)[start : start + size_bytes]


def refusal_of_direct(disk: Disk, directory_fd: int) -> str:
    """Return why the file system takes no direct I/O, or an empty string; asked by a real write and read of a page."""
    flags = OPEN_FLAGS | os.O_CREAT | os.O_DIRECT
    page = Scratch().take(PAGE_BYTES)
    try:
        fd = os.open(PROBE_NAME, flags, FILE_MODE, dir_fd=directory_fd)
    except OSError as error:
        remove(PROBE_NAME, dir_fd=directory_fd)
        return f"the file system refuses O_DIRECT ({error.strerror})"
    try:
        write_fully(disk, fd, [page], 0)
        if read_fully(disk, fd, [page], 0) != PAGE_BYTES:
            return "a page written with O_DIRECT cannot be read back"
    except OSError as error:
        return f"a direct write fails here ({error.strerror})"
    finally:
        os.close(fd)
        remove(PROBE_NAME, dir_fd=directory_fd)  # if it stays, the next opening reports the error
    return ""
