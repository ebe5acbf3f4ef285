"""An owner: one tier in one process that shares a directory, and the file that says so.

The file is locked as long as the owner lives; the kernel takes the lock away from a process that ends, however it
ends. A reset of the cache is noted there with one small write that needs no lock, and survives the process. The file is
not mapped: a mapped page whose file is cut off, or whose server is gone, ends the process that touches it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv_fs.layout import EPOCH, NAMESPACE, OWNER
from tiered_kv_fs.posix import is_linked, opened, opened_directory, remove, try_lock, unlock, write_all

_OWNER_BYTES: Final = 4096
_NEW_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_LISTING_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WORD = struct.Struct("<Q")
_ASKED_AT: Final = 0
"""The last reset that was asked for."""
_KNOWN_AT: Final = 8
"""The last reset that the epoch file knows of."""
_TEXT_AT: Final = 64
_TEXT = struct.Struct("<32s16s")  # namespace and epoch, in hex
_WHO_AT: Final = 256


@dataclass(frozen=True, slots=True)
class OwnerNote:
    """What an owner's file says.

    Args:
        name: The owner.
        is_alive: Whether its process is there.
        namespace: The directory of its namespace.
        epoch: The epoch that it works in.
        has_lost_reset: Whether it ended before a reset came to be known to others.
    """

    name: str
    is_alive: bool
    namespace: str
    epoch: str
    has_lost_reset: bool


class Owner:
    """This tier's own file.

    Make it while the ledger is locked: between making the file and locking it, it looks like a dead one's.

    Args:
        directory: Where owners' files are.
        namespace: The directory of the owner's namespace.
    """

    def __init__(self, directory: str, namespace: str) -> None:
        self.name = secrets.token_hex(8)
        self._directory = directory
        self._path = f"{directory}/{self.name}"
        self._namespace = namespace
        with opened_directory(directory) as directory_fd:
            self._fd = os.open(self.name, _NEW_FLAGS, 0o600, dir_fd=directory_fd)
        self._lock = threading.Lock()  # between a late note of a reset and `close`
        who = f"{socket.gethostname()} {os.getpid()}\n".encode()[: _OWNER_BYTES - _WHO_AT]
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(self._fd, [bytes(_WHO_AT), who, bytes(_OWNER_BYTES - _WHO_AT - len(who))])
        except BaseException:
            os.close(self._fd)
            remove_owner(directory, self.name)
            raise

    @property
    def is_present(self) -> bool:
        """Whether the file is still in its place."""
        return is_linked(self._fd, self._path)

    def ask_for_reset(self, number: int) -> None:
        """Note that reset `number` of this tier has been asked for. Any thread that may wait."""
        self._write(_WORD.pack(number), _ASKED_AT)

    def note_epoch(self, epoch: str, number: int) -> None:
        """Note that the epoch file says `epoch`, which it does since reset `number`. Any thread that may wait."""
        self._write(_TEXT.pack(self._namespace.encode(), epoch.encode()), _TEXT_AT)
        self._write(_WORD.pack(number), _KNOWN_AT)

    def close(self, *, remove_file: bool) -> None:
        """Give the lock back; the file goes too, unless it has to tell of a reset."""
        if remove_file:
            remove_owner(self._directory, self.name)
        with self._lock:
            fd, self._fd = self._fd, -1
            try:
                unlock(fd)
            finally:
                os.close(fd)

    def _write(self, data: bytes, at: int) -> None:
        with self._lock:
            if self._fd >= 0 and os.pwrite(self._fd, data, at) != len(data):
                raise OSError(errno.EIO, "the owner's file was written in part", self._path)


def read_owners(directory: str) -> list[OwnerNote]:
    """Return what the owners' files say. Call it while the ledger is locked.

    Raises:
        OSError: There is no such directory, or it is a symbolic link; or the file system does not let us.
    """
    notes = []
    directory_fd = os.open(directory, _LISTING_FLAGS)
    try:
        for name in os.listdir(directory_fd):
            if OWNER.fullmatch(name):
                note = _read_owner(directory_fd, name)
                if note is not None:
                    notes.append(note)
    finally:
        os.close(directory_fd)
    return notes


def remove_owner(directory: str, name: str) -> None:
    """Remove an owner's file, if it is there and the file system lets us."""
    with suppress(OSError), opened_directory(directory) as directory_fd:
        remove(name, directory_fd)


def _read_owner(directory_fd: int, name: str) -> OwnerNote | None:
    try:
        with opened(name, os.O_RDWR, directory_fd) as fd:
            is_alive = not try_lock(fd)
            if not is_alive:
                unlock(fd)
            data = os.pread(fd, _OWNER_BYTES, 0).ljust(_OWNER_BYTES, b"\0")
    except FileNotFoundError:  # it ended a moment ago
        return None
    asked, known = struct.unpack_from("<QQ", data)
    namespace, epoch = (field.decode("ascii", "replace") for field in _TEXT.unpack_from(data, _TEXT_AT))
    if not NAMESPACE.fullmatch(namespace) or not EPOCH.fullmatch(epoch):
        return OwnerNote(name, is_alive, "", "", has_lost_reset=False)  # it ended before it had stored anything
    return OwnerNote(name, is_alive, namespace, epoch, has_lost_reset=not is_alive and asked != known)
