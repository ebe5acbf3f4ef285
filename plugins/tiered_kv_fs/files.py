"""Calls to a shared file system. Any thread may call, except the scheduler's: all of them may wait."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tiered_kv.permissions import DIRECTORY_MODE
from tiered_kv.toolkit.small_files import has_name, opened

ALLOCATION_BYTES: Final = 4096

_REASONS: Final = {
    errno.ENOENT: "missing",
    errno.ESTALE: "stale",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ELOOP: "not_a_file",
    errno.ENXIO: "not_a_file",
    errno.EISDIR: "not_a_file",
    errno.ENOTDIR: "not_a_file",
}
_LOCK_POLL_S: Final = 0.01


def reason_of(error: OSError) -> str:
    return "timeout" if isinstance(error, TimeoutError) else _REASONS.get(error.errno or 0, "io_error")


def round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def occupied_bytes(status: os.stat_result) -> int:
    """Return the space of an entry, also if the file system has not allocated it yet."""
    return max(status.st_blocks * 512, round_up(status.st_size) if stat.S_ISREG(status.st_mode) else 0)


@contextmanager
def locked(path: str, timeout_s: float) -> Iterator[float]:
    """Hold the lock of the file at `path`, which is made if it is missing; yield the file server's time.

    flock(2), which Linux supports over NFS too. The kernel releases the lock of a process that ends.

    Raises:
        TimeoutError: Other processes held the lock all the time.
        OSError: The file system refuses, or has no locks.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                try:
                    if has_name(path, fd):
                        os.utime(fd)
                        yield os.fstat(fd).st_mtime
                        return
                finally:  # closing is not enough: a child that was forked meanwhile holds the lock too
                    fcntl.flock(fd, fcntl.LOCK_UN)
        if time.monotonic() >= deadline:
            raise TimeoutError(None, f"{path} was locked by others for {timeout_s:g} s")
        time.sleep(_LOCK_POLL_S)


def make_directory(path: str) -> bool:
    """Make a directory with mode 0700; return False if it exists."""
    with suppress(FileExistsError):
        os.mkdir(path, DIRECTORY_MODE)
        return True
    return False


def unlink_same(path: str, status: os.stat_result) -> None:
    """Remove a file if it is still the one that had `status`: another process may have replaced it."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), status):
            os.unlink(path)
