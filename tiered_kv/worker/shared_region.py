"""One region for several processes: a scheduler, and the workers of one engine.

Whoever comes first creates the file, and the others map it; an engine may make its workers' handlers before its
manager (vLLM does) or after. The last to map it removes its name, so from then on the memory lives as long as those
who map it, however they end.

While the file has its name, each party that maps it holds a lock on a byte of its own (open file description locks,
fcntl(2)), and a lock on one byte more while it joins. The kernel drops a lock with the process that held it, so a party
that was killed is missing again, and a file without locks is left over from a run that was killed as it started. The
last party marks the file once it has removed the name; a party learns from the mark that all the others are there.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tiered_kv.cpu.region import SHARED_MEMORY_DIRECTORY, PrimaryRegion, size_shared
from tiered_kv.errors import ConfigError
from tiered_kv.permissions import FILE_MODE, NotPrivateError, check_file

JOIN_TIMEOUT_S = 300.0
"""How long a party waits for another one's turn; the first to come clears all of the memory in its own."""

_TURN_BYTE = 1 << 40
_COMPLETE_MODE = 0o400
_FLOCK = "hhqqi0q"
"""struct flock of fcntl(2): type, whence, start, length, pid."""
_POLL_S = 0.005


class SharedRegion(PrimaryRegion):
    """A region that several processes map. Made by `join`; one thread calls."""

    _fd: int | None = None
    """Holds the locks until all parties have come."""
    _file: Path
    _party: str
    _parties: tuple[str, ...]

    @classmethod
    def join(
        cls,
        name: str,
        num_blocks: int,
        block_bytes: int,
        *,
        party: str,
        parties: Sequence[str],
        huge_pages: bool = True,
        numa_node: int | None = None,
    ) -> Self:
        """Map the region called `name`. Every party gives the same arguments, but for `party`.

        Args:
            name: A file name that belongs to this run of the engine alone.
            num_blocks: Rows, at least 1.
            block_bytes: Bytes of a row, at least 1.
            party: Who joins, one of `parties`.
            parties: All who will.
            huge_pages: As for `PrimaryRegion`.
            numa_node: Likewise.

        Raises:
            ConfigError: The memory cannot be had, another process is that party already, or sizes differ.
        """
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(f"a region needs at least one block and one byte, not {num_blocks} x {block_bytes}")
        if not name or "/" in name:
            raise ConfigError(f"{name!r} is not a file name; give a plain name for a file in {SHARED_MEMORY_DIRECTORY}")
        # A name that no `primary.shared` can have: without locks, such a file might be in use all the same.
        path, size_bytes = SHARED_MEMORY_DIRECTORY / f"{name}+workers", num_blocks * block_bytes
        fd = _open_for_turn(path)
        try:
            if not _try_lock(fd, parties.index(party)):
                raise ConfigError(f"another process is '{party}' in {path}; give each run of the engine its own name")
            is_alone = not _present(fd, parties)
            if is_alone:
                os.ftruncate(fd, size_bytes)  # from nothing, or from what a run that was killed has left
            region = cls.attach(path, num_blocks, block_bytes, huge_pages=huge_pages, numa_node=numa_node)
            region._fd, region._file, region._party, region._parties = fd, path, party, tuple(parties)
        except BaseException:
            _leave(fd, path, parties)
            raise
        try:
            if is_alone:
                size_shared(fd, path, size_bytes)  # pages go where the mapping was bound to
            if not region.missing_parties():
                path.unlink()
                os.fchmod(fd, _COMPLETE_MODE)
            _lock(fd, _TURN_BYTE, fcntl.F_UNLCK)
        except BaseException:
            region.close()
            raise
        return region

    def is_complete(self) -> bool:
        """Return whether all parties have mapped the region; they may have left since."""
        if self._fd is None:
            return True
        if stat.S_IMODE(os.fstat(self._fd).st_mode) != _COMPLETE_MODE:
            return False
        os.close(self._fd)
        self._fd = None
        return True

    def missing_parties(self) -> list[str]:
        """Return who has not mapped the region yet."""
        if self._fd is None or self.is_complete():
            return []
        present = {self._party, *_present(self._fd, self._parties)}
        return [party for party in self._parties if party not in present]

    def unlink(self) -> None:
        """Leave, if not all have come yet; the name goes with the last who leaves. Otherwise do nothing."""
        if self._fd is not None and not self.is_complete():
            fd, self._fd = self._fd, None
            _leave(fd, self._file, self._parties)


def _open_for_turn(path: Path) -> int:
    """Open the file, or create it, and take the turn at changing who is there."""
    end_s = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
        except OSError as error:
            raise ConfigError(f"cannot open {path}: {error.strerror}") from error
        try:
            check_file(fd, str(path))  # anybody may create files there, and would read what is stored
        except NotPrivateError as error:
            os.close(fd)
            raise ConfigError(f"{error.strerror}; give each run of the engine a name of its own") from error
        if _take_turn(fd, end_s) and os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # the last of an earlier run's parties has removed the name meanwhile
        if time.monotonic() >= end_s:
            raise ConfigError(f"another process has been mapping {path} for {JOIN_TIMEOUT_S:.0f} s; see what holds it")


def _take_turn(fd: int, end_s: float) -> bool:
    while not _try_lock(fd, _TURN_BYTE):
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _leave(fd: int, path: Path, parties: Sequence[str]) -> None:
    """Give up every lock, and remove the name if nobody else is there."""
    if _take_turn(fd, time.monotonic() + JOIN_TIMEOUT_S) and os.fstat(fd).st_nlink and not _present(fd, parties):
        path.unlink()
    os.close(fd)


def _present(fd: int, parties: Sequence[str]) -> list[str]:
    """Return which parties others hold the lock of; one's own lock is no obstacle to oneself, and does not show."""
    return [party for index, party in enumerate(parties) if _is_locked(fd, index)]


def _try_lock(fd: int, byte: int) -> bool:
    try:
        _lock(fd, byte, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def _lock(fd: int, byte: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))


def _is_locked(fd: int, byte: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
