"""The socket that a server listens at. Its path belongs to the server that has made it, which alone removes it.

`tiered-kv serve` makes it on its main thread. Two servers that begin or end at one path at the same time hold a lock of
its directory, one after the other, while they look at the path and change it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tiered_kv.errors import ConfigError
from tiered_kv.server import protocol
from tiered_kv.system.file_systems import is_held

BACKLOG: Final = 1024
"""Connections that wait to be accepted: a thousand engines may attach at once to a server that has come back."""
LOCK_S: Final = 5.0
"""How long a server waits for another one that begins or ends in the same directory."""
_LOCK_POLL_S: Final = 0.01


class Listener(socket.socket):
    """A unix socket of packets (SOCK_SEQPACKET) that listens at a path. One thread calls.

    Args:
        path: The path to listen at. A socket that lies there is replaced if no process listens at it.
        mode: The permissions of the path.

    Raises:
        ConfigError: Another server listens there, or the path cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path = Path(path)
        self._file: tuple[int, int, int] | None = None
        """Identifies the file that this socket has made."""
        try:
            with _locked(self.path.parent):
                self._listen(mode)
        except OSError as error:
            self.close()
            message = f"cannot listen at {self.path}: {self._reason(error)}"
            raise ConfigError(message, location="--socket") from error
        except BaseException:
            self.close()
            raise

    def _listen(self, mode: int) -> None:
        if self.path.is_symlink() and not _is_listened_at(self.path):  # it is not ours to remove
            why = f"it is a symbolic link to {os.readlink(self.path)}: give that path, or remove the link"
            raise ConfigError(f"cannot listen at {self.path}: {why}", location="--socket")
        if self.path.is_socket() and not _is_listened_at(self.path):
            self.path.unlink(missing_ok=True)
        self.bind(str(self.path))
        self._file = _identity_of(self.path)
        try:
            self.path.chmod(mode)
            self.listen(BACKLOG)
        except BaseException:
            self._unlink()
            raise

    def _reason(self, error: OSError) -> str:
        if self.path.is_socket():
            return "a server listens there already"
        if error.errno == errno.ENOENT:  # such as one below /run, which is empty after a start of the machine
            return f"there is no directory {self.path.parent}; make it, or give another path"
        return error.strerror or str(error)

    def remove(self) -> None:
        """Remove the path, unless somebody else has made it anew. A second call does nothing."""
        with suppress(OSError, ConfigError), _locked(self.path.parent):
            self._unlink()

    def _unlink(self) -> None:
        if self._file is not None and _identity_of(self.path) == self._file:
            self.path.unlink(missing_ok=True)
        self._file = None


def listen(path: str | os.PathLike[str], *, mode: int = 0o600) -> Listener:
    """Return a socket that listens at `path`.

    Raises:
        ConfigError: Another server listens there, or the path cannot be used.
    """
    protocol.check_path(os.fspath(path), "--socket")
    return Listener(path, mode)


def _is_listened_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.setblocking(False)
        return other.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _identity_of(path: Path) -> tuple[int, int, int] | None:
    with suppress(OSError):
        status = path.lstat()
        return status.st_dev, status.st_ino, status.st_mtime_ns  # another file may get the number of a removed one
    return None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory (flock(2)); a file system without such locks has none.

    Raises:
        ConfigError: Others hold it for too long.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, directory)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, directory: Path) -> None:
    end_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not is_held(error):  # NFS wants a file that is open for writing
                return
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"another server begins or ends in {directory}, and holds its lock for {LOCK_S:g} s: end it, or "
                    "give another directory",
                    location="--socket",
                ) from None
            time.sleep(_LOCK_POLL_S)
        else:
            return
