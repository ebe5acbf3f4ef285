"""The lock of a directory: flock(2) on a file in it, and on the directory itself.

The file alone may be deleted while it is locked; then another process would make and lock a new one. A directory has no
such second life, but network file systems lock only files that are open for writing. systemd-tmpfiles deletes nothing
below a locked directory.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Final

from tiered_kv.errors import TierBusyError
from tiered_kv.permissions import check_file
from tiered_kv.toolkit.claimed import ClaimedDirectory
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS

LOCK_NAME: Final = "lock"

_TEXT_BYTES_MAX: Final = 128
_CLEANER_S: Final = 0.5
"""How long a cleaner such as systemd-tmpfiles may hold the directory's lock while it looks into it."""
_POLL_S: Final = 0.02


def take_lock(directory_fd: int, claimed: ClaimedDirectory) -> int:
    """Lock an open directory; return the descriptor of its lock file. `release_lock` takes both.

    Raises:
        TierBusyError: Another process, or another tier of this process, holds it; the message says which.
        OSError: The file system failed.
    """
    fd = os.open(LOCK_NAME, OPEN_FLAGS | os.O_NONBLOCK | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        check_file(fd, f"{claimed.path}/{LOCK_NAME}", any_owner=not claimed.private)  # before the first write to it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(fd, fd, claimed) from error
        _lock_directory(directory_fd, fd, claimed)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {socket.gethostname()}\n".encode()[:_TEXT_BYTES_MAX], 0)
        undo.pop_all()
    return fd


def release_lock(lock_fd: int, directory_fd: int) -> None:
    """Unlock both, and close the lock file. Closing alone would leave them with a child that was forked meanwhile."""
    for fd in (directory_fd, lock_fd):
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(lock_fd)


def _lock_directory(directory_fd: int, lock_fd: int, claimed: ClaimedDirectory) -> None:
    deadline = time.monotonic() + _CLEANER_S
    while True:
        try:
            fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise _busy(directory_fd, lock_fd, claimed) from error
            time.sleep(_POLL_S)
        except OSError:  # a network file system: the file's lock must do
            return
        else:
            return


def _busy(locked_fd: int, lock_fd: int, claimed: ClaimedDirectory) -> TierBusyError:
    message = f"{claimed.path} is in use by {_holder(locked_fd, lock_fd)}; stop it, or give each tier its own directory"
    return TierBusyError(message, tier=claimed.tier, operation="open")


def _holder(locked_fd: int, lock_fd: int) -> str:
    """Say who holds the lock of an open file, as far as this process can see it.

    The kernel knows, and the file's text does not: its writer may have ended, or count processes in another container.
    """
    status = os.fstat(locked_fd)
    pids = [pid for pid in _pids() if _holds(pid, status)]
    if os.getpid() in pids:
        return "another tier of this process"
    if pids:
        return " and ".join(f"process {pid} ({_name(pid)})" for pid in pids)
    text = os.pread(lock_fd, _TEXT_BYTES_MAX, 0).decode("ascii", "replace").strip()
    said = f"; its owner wrote 'process {text}' into {LOCK_NAME}" if text.isprintable() and text else ""
    return f"a process that this one cannot see, of another user, in another container or on another host{said}"


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _holds(pid: int, status: os.stat_result) -> bool:
    """Return whether a process has the lock of a file. False if this process may not see that."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"{folder}/{name}"), status):
                    with open(f"/proc/{pid}/fdinfo/{name}") as file:  # has a line for each lock of this open file
                        if "FLOCK" in file.read():
                            return True
    return False


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "ended"
