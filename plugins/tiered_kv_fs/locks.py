"""Locks of the shared directory: flock(2) on a file of its own, which Linux supports over NFS and SMB too.

The ledger, the sweep and a purge take them, on any thread that may wait for the file system. The kernel releases the
lock of a process that ends.

A process may lose a lock that it holds, or the lock may never have excluded others. An NFS 4 server knows a client by
its host's name. It takes two hosts of one name for one restarted host, and ends the first host's locks when the second
host connects. Then both hosts take the lock, and writes by either descriptor fail with EIO (Linux 6.12, NFS 4.2). So
`Lock.mark` writes a random mark into the file, and `Lock.is_lost` reads it back and writes it again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Final

from tiered_kv.system.file_systems import OWN_NAME, is_held, mount_of
from tiered_kv.toolkit.small_files import has_name, opened
from tiered_kv_fs.full_disk import with_room

_LOST: Final = frozenset({errno.EIO, errno.ESTALE, errno.EBADF})
"""Errors of calls on a lock's descriptor, once the server has lost the lock or the open file."""
_LOST_TRIES: Final = 10  # how often the file is opened anew after such an error
_LOST_PAUSE_S: Final = 0.2  # the longest pause before each try; random, as two hosts may take the lock from each other
_SMB: Final = frozenset({"cifs", "smb3"})
_POLL_S: Final = 0.01
_POLL_S_MAX: Final = 0.1
"""The longest pause of a waiter. A pause is a quarter of the time waited so far, at least `_POLL_S`. The waiter keeps
the file open: on SMB, each opening empties the holder's cache of the file, and slows all calls of the holder."""
_MARK_BYTES: Final = 16


class LostLockError(OSError):
    """Another process has changed the file that the lock protects. This process wrote nothing."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EIO, f"others hold the lock, too; {OWN_NAME}", path)


class Lock:
    """A lock that this process has taken. Only the thread that took it calls."""

    def __init__(self, fd: int, now_s: float) -> None:
        self.now_s = now_s
        """The file server's time when the lock was taken, in seconds."""
        self._fd = fd
        self._mark = b""
        self._is_lost = False

    def mark(self) -> None:
        """Write a random mark into the file, unless the disk is full or the mount writes front to back only.

        On SMB there is no mark: its locks exclude others. A mark would be written late, against another host's lock.
        """
        if _kind(self._fd) in _SMB:
            return
        self._mark = secrets.token_hex(_MARK_BYTES // 2).encode()
        try:
            os.pwrite(self._fd, self._mark, 0)
        except OSError as error:
            self._is_lost, self._mark = error.errno in _LOST, b""

    def is_lost(self) -> bool:
        """Return whether others are known to have taken the lock since `mark`."""
        if not self._mark:
            return self._is_lost
        try:
            if os.pread(self._fd, _MARK_BYTES, 0) != self._mark:
                return True
            os.pwrite(self._fd, self._mark, 0)
            if _kind(self._fd).startswith("nfs"):  # NFS writes late, and reads from its cache
                os.fsync(self._fd)
        except OSError as error:
            return error.errno in _LOST
        return False


@contextmanager
def locked(path: str, timeout_s: float) -> Iterator[Lock]:
    """Hold the lock of the file at `path`, which is made if it is missing.

    Raises:
        TimeoutError: Other processes held the lock all the time.
        OSError: The file system refuses, or has no locks.
    """
    deadline = time.monotonic() + timeout_s
    losses = 0
    while True:
        try:
            with ExitStack() as tried:
                lock = _taken(path, deadline, tried)
                held = tried.pop_all()
        except OSError as error:
            losses += 1
            if error.errno not in _LOST or losses >= _LOST_TRIES:
                raise
        else:
            try:
                if lock is not None:
                    yield lock
                    return
            finally:
                _release(held)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} was locked by other processes for {timeout_s:g} s")
        time.sleep(random.uniform(0.0, _LOST_PAUSE_S) if losses else _POLL_S)


def _taken(path: str, deadline: float, held: ExitStack) -> Lock | None:
    """Open the file and lock it, until `held` is closed; return None if others held the lock, or removed the file."""
    root = os.path.dirname(path)
    fd = with_room(root, lambda: held.enter_context(opened(path, os.O_RDWR | os.O_CREAT)))
    begin = time.monotonic()
    while not try_lock(fd):
        now = time.monotonic()
        if now >= deadline:
            return None
        pause_s = min(max(_POLL_S, (now - begin) / 4), _POLL_S_MAX)
        time.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0.0, deadline - now)))
    held.callback(_unlock, fd)
    if not has_name(path, fd):
        return None
    with_room(root, partial(os.utime, fd))
    return Lock(fd, os.fstat(fd).st_mtime)


def _release(held: ExitStack) -> None:
    try:
        held.close()
    except OSError as error:  # the file holds nothing but the mark
        if error.errno not in _LOST:
            raise


def try_lock(fd: int) -> bool:
    """Take the lock of an open file; return False if others hold it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not is_held(error):
            raise
        return False
    return True


def _unlock(fd: int) -> None:
    """Release a lock. Closing is not enough: a child that was forked meanwhile holds it too."""
    with suppress(OSError):  # it is lost
        fcntl.flock(fd, fcntl.LOCK_UN)


_kinds: Final[dict[int, str]] = {}
"""The kinds of file systems, by device. Any thread assigns."""


def _kind(fd: int) -> str:
    device = os.fstat(fd).st_dev
    if device not in _kinds:
        mount = mount_of(fd)
        _kinds[device] = mount.kind if mount is not None else ""
    return _kinds[device]
