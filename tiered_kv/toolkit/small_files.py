"""Files of a tier's directory: small ones are read whole, and replaced in one step.

Tiers and administrations call it on any thread but the scheduler's. A reader finds the old bytes of a file or the new
ones, no mixture. No symbolic link is followed. Failures are logged at a bounded rate.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.permissions import FILE_MODE
from tiered_kv.toolkit.failure_texts import OF_LOOKUPS, FailureTexts
from tiered_kv.toolkit.jobs import failure_reason

SMALL_FILE_BYTES_MAX: Final = 1 << 20

_SAFE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""O_NONBLOCK: if a pipe is in place of the file, to open it does not wait for the pipe's other end."""
_IN_USE: Final = frozenset({errno.ENOENT, errno.EACCES, errno.EBUSY})
"""Errors of a rename if other processes have the old file open."""
_RENAME_S: Final = 0.5  # how long a rename is tried
_RENAME_PAUSE_S: Final = 0.02
_REMEDIES: Final = {
    errno.EROFS: "mount the file system so that it can be written; its errors are in the kernel's log",
    errno.ENOENT: "somebody has deleted, moved or replaced the directory",
    errno.ENOTDIR: "somebody has replaced the directory",
    errno.EIO: "look at the disk, and at the kernel's log",
    errno.EACCES: "give this process's user the permission",
    errno.EPERM: "give this process's user the permission, or remove the attribute 'i' (chattr -i)",
    errno.ENOSPC: "free the disk, or lower 'capacity'",
    errno.EDQUOT: "raise the quota, or lower 'capacity'",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "mount the file system again",
}
"""The remedy of an error, by its number."""
_NOT_A_FILE: Final = frozenset({errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR})


@contextmanager
def opened(path: str, flags: int, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a file, which must not be a symbolic link, and close it at the end. New files have mode 0600.

    An `OSError` of a call on the descriptor gets the file's path.
    """
    fd = os.open(path, flags | _SAFE_FLAGS, FILE_MODE, dir_fd=dir_fd)
    try:
        try:
            yield fd
        finally:
            os.close(fd)  # which reports late errors of a network file system
    except OSError as error:
        if error.errno is not None and not isinstance(error.filename, str):  # none, or the descriptor's number
            error.filename = path
        raise


def read_file(path: str, size_max_bytes: int) -> bytes | None:
    """Return a file's bytes; None if it is missing, longer than `size_max_bytes`, or not a regular file."""
    try:
        with opened(path, os.O_RDONLY) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > size_max_bytes:
                return None
            return os.pread(fd, size_max_bytes, 0)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return None
        raise


def replace_file(
    path: str, data: bytes, *, dir_fd: int | None = None, only_new: bool = False, flush: bool = False
) -> None:
    """Write a small file in one step: a reader finds the old bytes or the new ones.

    With `only_new`, an existing file is kept. Without `flush` a power failure may leave an empty file.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd) as fd:
            write_all(fd, [data])
            if flush:
                os.fsync(fd)
        if not (only_new and _link(temporary, path)):
            put_in_place(temporary, path, dir_fd=dir_fd)
            return
    except OSError:
        remove(temporary, dir_fd=dir_fd)
        raise
    remove(temporary)


def put_in_place(temporary: str, path: str, *, dir_fd: int | None = None) -> None:
    """Rename a file to `path`, in place of a file there.

    While another process has the older file open, SMB refuses the rename with ENOENT, and removes the file once that
    process closes it (Linux 6.12 with Samba 4.22). So the rename is tried again for a moment.
    """
    end_s = time.monotonic() + _RENAME_S
    while True:
        try:
            os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError as error:
            if error.errno not in _IN_USE or time.monotonic() >= end_s or not _exists(temporary, dir_fd):
                raise
            time.sleep(_RENAME_PAUSE_S)
        else:
            return


def _exists(path: str, dir_fd: int | None) -> bool:
    with suppress(OSError):
        os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        return True
    return False


def _link(temporary: str, path: str) -> bool:
    """Return whether `path` now exists, perhaps by another process. False without hard links (CIFS, FUSE)."""
    try:
        os.link(temporary, path)
    except OSError as error:
        return isinstance(error, FileExistsError)
    return True


Transfer = Callable[[int, Sequence[Any], int], int]  # Any: bytes or memoryviews
"""os.pwritev, os.preadv, or a function in their place."""


def write_all(
    fd: int, parts: Sequence[bytes | memoryview], offset: int = 0, *, pwritev: Transfer | None = None
) -> None:
    """Write all of `parts` at `offset`. After an `OSError` some bytes may have been written."""
    total, done = sum(map(len, parts)), 0
    while done < total:
        left = rest_of([memoryview(part) for part in parts], done) if done else parts
        written = (pwritev or os.pwritev)(fd, left, offset + done)
        if written <= 0:
            raise OSError(errno.EIO, f"{done} of {total} bytes were written")
        done += written


def read_all(fd: int, buffers: Sequence[memoryview], offset: int = 0, *, preadv: Transfer | None = None) -> int:
    """Fill `buffers` from `offset`; return the number of bytes read, fewer only at the end of the file."""
    total, done = sum(map(len, buffers)), 0
    while done < total:
        count = (preadv or os.preadv)(fd, rest_of(buffers, done) if done else buffers, offset + done)
        if count <= 0:
            break
        done += count
    return done


def rest_of(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the rest of `buffers` after their first `done` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def has_name(name: str, fd: int, *, dir_fd: int | None = None) -> bool:
    """Return whether an open file still has this name or path: it may have been deleted or moved."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False), os.fstat(fd))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE if another host has removed it
            return False
        raise


def names_in(fd: int) -> list[str]:
    """Return the names in an open directory as they are now.

    The directory is opened anew. On btrfs, a descriptor shows the entries from when it was opened, or was last read to
    its end (Linux 6.18). And `os.listdir` of a descriptor moves an offset that threads share.
    """
    with opened(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd) as again:
        return os.listdir(again)


def remove(path: str, *, dir_fd: int | None = None) -> bool:
    """Remove a file; return whether this call removed it."""
    with suppress(OSError):
        os.unlink(path, dir_fd=dir_fd)
        return True
    return False


def words_of(error: OSError) -> str:
    """Return the system's words for an error, with the name of its number, and without a path."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}{f' ({name})' if name else ''}"


def told(error: BaseException, place: str = "") -> str:
    """Return an error as a text: the system's words, and the path unless it is `place`; no descriptor's number."""
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    path = error.filename if isinstance(error.filename, str) and error.filename != place else ""
    return f"{words_of(error)}{path and f': {path}'}"


def remedy_for(error: OSError) -> str:
    """Return the remedy of an error, to be added to its words; empty if none is known."""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return remedy and f"; {remedy}"


def fields_of(text: bytes | str | None) -> dict[str, object]:
    """Return the fields of a JSON object; empty if `text` is not one."""
    try:
        fields = json.loads(text or b"")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def as_text(fields: Mapping[str, object]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n").encode()


LOOKING: Final = "looking for blocks"
"""The name of the operation of lookups; see `FirstFailures.note`."""


class FirstFailures:
    """Logs failures of file operations in the system's words; each operation and error number at a bounded rate.

    Any thread may call. `place` is the path for errors without one. `texts` has the newest failure of each reason.
    """

    def __init__(self, log: logging.Logger, place: str, reason_of: Callable[[OSError], str] = failure_reason) -> None:
        self._log = log
        self._place = place
        self._reason_of = reason_of
        self.texts = FailureTexts()
        self._limit = LogLimit()
        self.newest = ""
        """The newest failure with its path, for people, until the owner of this object clears it."""

    def note(self, operation: str, error: OSError) -> None:
        where = error.filename if isinstance(error.filename, str) else self._place
        self.newest = f"{operation} failed: {words_of(error)}: {where}"
        text = self.newest + remedy_for(error)
        self.texts.note(self._reason_of(error), text)
        if operation == LOOKING:
            self.texts.note(OF_LOOKUPS, text)
        if self._limit.take((operation, error.errno)) is not None:
            said = f"{told(error, self._place)}{remedy_for(error)}"
            self._log.warning("%s: %s failed: %s; %s", self._place, operation, said, self._limit.about)
