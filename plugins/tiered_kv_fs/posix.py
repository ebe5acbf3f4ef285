"""System calls with the flags that a directory needs which others can write to. Any thread may call."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tiered_kv.permissions import DIRECTORY_MODE, FILE_MODE, NotPrivateError, check_file

SAFE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""O_NONBLOCK, so that opening a pipe that somebody put in a file's place does not wait for its other end."""
DIRECTORY_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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
    errno.EMLINK: "not_a_file",
    errno.EISDIR: "not_a_file",
    errno.ENXIO: "not_a_file",
    errno.ENAMETOOLONG: "not_a_file",
    errno.ENOTDIR: "not_a_file",
}
_LOCK_POLL_S: Final = 0.002
_LOCK_POLL_MAX_S: Final = 0.05


def reason_of(error: OSError) -> str:
    """Return the one word that counters file a failed call under."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, NotPrivateError) and error.errno == errno.EPERM:
        return "not_private"
    return _REASONS.get(error.errno or 0, "io_error")


def occupied_bytes(status: os.stat_result) -> int:
    """Return what an entry occupies, or will once the file system has decided where its bytes go."""
    if not stat.S_ISREG(status.st_mode):
        return status.st_blocks * 512
    return max(status.st_blocks * 512, round_up(status.st_size))


def round_up(size_bytes: int) -> int:
    """Return the size in whole allocation units."""
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


@contextmanager
def opened(path: str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a file, made with mode 0600 if `flags` says so, and close it."""
    fd = os.open(path, flags | SAFE_FLAGS, FILE_MODE, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_directory(path: str, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor for calls relative to a directory, which must not be a symbolic link."""
    fd = os.open(path, DIRECTORY_FLAGS, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_above(path: str, root: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the directory that an entry is in, for calls relative to it, and the entry's name there.

    Args:
        path: The entry.
        root: A directory above it; no symbolic link is followed from there on.
    """
    *above, name = path[len(root) + 1 :].split("/")
    fd = os.open(root, DIRECTORY_FLAGS)
    try:
        for directory in above:
            inner = os.open(directory, DIRECTORY_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, name
    finally:
        os.close(fd)


@contextmanager
def locked(path: str, timeout_s: float) -> Iterator[int]:
    """Yield a descriptor of the file at `path`, which is made if it is missing, with its lock held.

    flock(2), which Linux carries out over NFS too. The lock goes with its process, however that ends.

    Raises:
        TimeoutError: Others held it all the time.
        OSError: The file system does not let us, or has no locks.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _LOCK_POLL_S
    while True:
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            if try_lock(fd):
                try:
                    if is_linked(fd, path):
                        check_file(fd, path, any_owner=True)  # the directory says who can put a file here
                        yield fd
                        return
                finally:
                    unlock(fd)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} was locked by others for {timeout_s} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOCK_POLL_MAX_S)


def try_lock(fd: int) -> bool:
    """Take a file's lock, if nobody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give a file's lock back. To close the file is not enough: a child that was forked meanwhile has it open too."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_linked(fd: int, path: str) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError as error:
        if reason_of(error) in ("missing", "stale"):  # another host has removed it
            return False
        raise


def make_directory(path: str, dir_fd: int | None = None) -> bool:
    """Make a directory with mode 0700; return False if there is one."""
    try:
        os.mkdir(path, DIRECTORY_MODE, dir_fd=dir_fd)
    except FileExistsError:
        return False
    return True


def directories(path: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the paths of the directories in `path` whose names match; symbolic links are none. Empty if it is gone."""
    try:
        with os.scandir(path) as entries:
            return [
                entry.path for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def read_file(path: str, size_max_bytes: int, dir_fd: int | None = None) -> bytes | None:
    """Return a small file's bytes, None if it is missing or no regular file of at most that size."""
    try:
        with opened(path, os.O_RDONLY, dir_fd) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > size_max_bytes:
                return None
            return os.pread(fd, size_max_bytes, 0)
    except OSError as error:
        if reason_of(error) in ("missing", "not_a_file"):
            return None
        raise


def replace_file(dir_fd: int, name: str, data: bytes, *, flush: bool = False) -> None:
    """Put a small file into place in one step; whoever reads it finds the old bytes or the new ones.

    Args:
        dir_fd: The directory, open.
        name: The file's name there.
        data: All of it.
        flush: Whether that shall hold after a power failure too, which may leave an empty file otherwise.
    """
    temporary = f".{name}.{secrets.token_hex(8)}.tmp"
    try:
        with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd) as fd:
            write_all(fd, [data])
            if flush:
                os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        remove(temporary, dir_fd)
        raise


def write_all(fd: int, parts: list[bytes | memoryview]) -> None:
    """Write buffers one after the other, with as few calls as the file system allows."""
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def read_all(fd: int, views: list[memoryview]) -> int:
    """Fill buffers from a file's beginning; return how many bytes there were."""
    position = 0
    while views and (count := os.preadv(fd, views, position)):
        position += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views and count:
            views[0] = views[0][count:]
    return position


def remove(path: str, dir_fd: int | None = None) -> bool:
    """Remove a file; return whether it was this call that did."""
    try:
        os.unlink(path, dir_fd=dir_fd)
    except OSError:
        return False
    return True


def take_away(path: str, aside: str, dir_fd: int | None = None) -> os.stat_result | None:
    """Remove a file; return what it was, or None unless it was this call that did.

    It gets the name `aside` first. Whatever is looked at before it is unlinked under `path`, another process may have
    put a file of another size there by then.
    """
    try:
        os.rename(path, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        return None
    status = None
    with suppress(OSError):
        status = os.stat(aside, dir_fd=dir_fd, follow_symlinks=False)
    return status if remove(aside, dir_fd) else None
