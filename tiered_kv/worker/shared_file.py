"""The file that the processes of one engine share. It shows which of them have joined, and has a note of each.

`SharedStack` and vLLM's spec join it, each process on the thread that opens its side. No process maps a region that
another run uses.

The processes are called parties. The file has a name only until all parties have joined. Until then:

- Each party holds a lock on a byte of its own (open file description locks, fcntl(2)).
- A party that changes the file also holds the exclusive lock, on one more byte.
- The kernel releases a lock when its process ends. So a party that was killed is missing again. A file without locks is
  left over from a run that was killed as it started.
- The last party to map the rows removes the name and marks the file. The mark shows every party that all have joined.

Behind the header of the region (`tiered_kv.cpu.region`), and before its rows, each party has room for a note. It
writes the note as it joins, and the others can wait for it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiered_kv.cpu.region import HEADER_BYTES, ROWS_OFFSET, SHARED_MEMORY_DIRECTORY
from tiered_kv.errors import ConfigError, needing_resources
from tiered_kv.system.file_systems import is_held
from tiered_kv.system.permissions import FILE_MODE, NotPrivateError, check_file

JOIN_TIMEOUT_S = 300.0
"""How long a party waits for the exclusive lock, or for a note. The first party to map rows clears them meanwhile."""
NOTE_BYTES = 4096
"""Bytes of each party's note, at most."""

_PARTIES_MAX = (ROWS_OFFSET - HEADER_BYTES) // NOTE_BYTES
_EXCLUSIVE_BYTE = 1 << 40
_COMPLETE_MODE = 0o400  # the mark
_FLOCK = "hhqqi0q"
"""struct flock of fcntl(2): type, whence, start, length, pid."""
_POLL_S = 0.005


class SharedFile:
    """The file, held open by one party. One thread calls.

    Args:
        name: A file name that belongs to this run of the engine alone.
        party: The name of this process, one of `parties`.
        parties: The names of all processes, in the same order in each of them.
        note: For the other parties, at most `NOTE_BYTES`, without a final zero byte.

    Raises:
        ConfigError: The file cannot be opened, or another process is that party already.
    """

    def __init__(self, name: str, party: str, parties: Sequence[str], note: bytes = b"") -> None:
        if not name or "/" in name:
            raise ConfigError(f"{name!r} is not a file name; give a plain name for a file in {SHARED_MEMORY_DIRECTORY}")
        if len(parties) > _PARTIES_MAX or len(note) > NOTE_BYTES:
            raise ConfigError(
                f"expected at most {_PARTIES_MAX} processes and notes of {NOTE_BYTES} bytes, found {len(parties)} "
                f"processes and a note of {len(note)} bytes"
            )
        self.path = SHARED_MEMORY_DIRECTORY / f"{name}+workers"
        self.party = party
        self.parties = tuple(parties)
        with needing_resources(f"{self.path} cannot be opened"):
            self._fd: int | None = _open_exclusively(self.path)
            try:
                if not _try_lock(self.fd, self.parties.index(party)):
                    raise ConfigError(
                        f"another process is '{party}' in {self.path}; give each run of the engine its own name"
                    )
                if not self._others():
                    os.ftruncate(self.fd, 0)  # left by a run that was killed
                os.pwrite(self.fd, note.ljust(NOTE_BYTES, b"\0"), self._note_offset(party))
                _lock(self.fd, _EXCLUSIVE_BYTE, fcntl.F_UNLCK)
            except BaseException:
                self._close(is_locked=True)
                raise

    @property
    def fd(self) -> int:
        """The descriptor; closed once `is_complete` has returned True, or after `leave`."""
        assert self._fd is not None
        return self._fd

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the exclusive lock: no other party changes the file, or joins.

        Raises:
            ConfigError: Another party has held the lock for too long.
        """
        if not _lock_exclusively(self.fd, time.monotonic() + JOIN_TIMEOUT_S):
            raise _timeout(self.path)
        try:
            yield
        finally:
            _lock(self.fd, _EXCLUSIVE_BYTE, fcntl.F_UNLCK)

    def notes_of(self, parties: Sequence[str]) -> list[bytes]:
        """Wait until these parties have joined, and return their notes.

        Raises:
            ConfigError: One of them does not join in time.
        """
        end_s = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            with self.exclusive():
                missing = [] if self._is_marked() else self._missing()
                if not set(missing).intersection(parties):
                    return [os.pread(self.fd, NOTE_BYTES, self._note_offset(party)).rstrip(b"\0") for party in parties]
            if time.monotonic() >= end_s:
                raise ConfigError(
                    f"{', '.join(each for each in missing if each in parties)} has not joined {self.path} within "
                    f"{JOIN_TIMEOUT_S:.0f} s; an engine's scheduler and workers start together, on one machine"
                )
            time.sleep(_POLL_S)

    def complete(self) -> None:
        """If all have joined, remove the name and mark the file. Called under the lock, after the rows are mapped."""
        if not self._is_marked() and not self._missing():
            self.path.unlink()
            os.fchmod(self.fd, _COMPLETE_MODE)

    def is_complete(self) -> bool:
        """Return whether all parties have joined; they may have left since."""
        if self._fd is None:
            return True
        if not self._is_marked():
            return False
        os.close(self._fd)
        self._fd = None
        return True

    def missing_parties(self) -> list[str]:
        """Return the parties that have not joined yet."""
        return [] if self._fd is None or self.is_complete() else self._missing()

    def leave(self) -> None:
        """Leave the parties. The last one to leave removes the name. Later calls do nothing."""
        if self._fd is not None and not self.is_complete():
            self._close(is_locked=_lock_exclusively(self.fd, time.monotonic() + JOIN_TIMEOUT_S))

    def _close(self, *, is_locked: bool) -> None:
        if is_locked and os.fstat(self.fd).st_nlink and not self._others():
            self.path.unlink()
        os.close(self.fd)
        self._fd = None

    def _is_marked(self) -> bool:
        return stat.S_IMODE(os.fstat(self.fd).st_mode) == _COMPLETE_MODE

    def _others(self) -> list[str]:
        """Return the other parties that have joined. This party's own lock is no conflict, and does not show."""
        return [party for index, party in enumerate(self.parties) if _is_locked(self.fd, index)]

    def _missing(self) -> list[str]:
        return [party for party in self.parties if party not in {self.party, *self._others()}]

    def _note_offset(self, party: str) -> int:
        return HEADER_BYTES + self.parties.index(party) * NOTE_BYTES


def _open_exclusively(path: Path) -> int:
    end_s = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
        except OSError as error:
            raise ConfigError(f"cannot open {path}: {error.strerror}") from error
        try:
            check_file(fd, str(path))  # any user may create files there, and could read the blocks
            if _lock_exclusively(fd, end_s) and os.fstat(fd).st_nlink:
                return fd
        except NotPrivateError as error:
            os.close(fd)
            raise ConfigError(f"{error.strerror}; give each run of the engine a name of its own") from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the last of an earlier run's parties has removed the name meanwhile
        if time.monotonic() >= end_s:
            raise _timeout(path)


def _lock_exclusively(fd: int, end_s: float) -> bool:
    while not _try_lock(fd, _EXCLUSIVE_BYTE):
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _timeout(path: Path) -> ConfigError:
    return ConfigError(f"another process has been mapping {path} for {JOIN_TIMEOUT_S:.0f} s; see what holds it")


def _try_lock(fd: int, byte: int) -> bool:
    try:
        _lock(fd, byte, fcntl.F_WRLCK)
    except OSError as error:
        if not is_held(error):
            raise
        return False
    return True


def _lock(fd: int, byte: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))


def _is_locked(fd: int, byte: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
