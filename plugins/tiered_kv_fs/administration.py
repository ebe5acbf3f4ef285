"""A shared directory without a stack: whose blocks it holds, and removing them while others use it.

A purge first gives the namespace's directory another name, `.<namespace>.<n>.purged`. From then on everything in it
is a miss, and whoever stores makes a new, empty directory. Then it deletes what has been moved away; what an earlier
purge was stopped at is found by its name. A process that still holds a directory of it open can add a file to it only
until that directory is removed, so it is looked at until it is gone.

The sweep lock is held meanwhile, as by everybody who takes removed files off the ledger's total.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.permissions import check_directory, check_file, open_directory
from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    Purged,
    StoredNamespace,
    TierAdministration,
    believed,
)
from tiered_kv_fs.layout import (
    BLOCK,
    EPOCH,
    LEDGER_NAME,
    MARKER_NAME,
    NAMESPACE,
    NAMESPACE_NAME,
    OWNERS_NAME,
    PURGED,
    SHARD,
    SWEEP_NAME,
    TEMPORARY,
    TEMPORARY_BLOCK,
)
from tiered_kv_fs.ledger import Ledger, LedgerState
from tiered_kv_fs.owner import read_owners, remove_owner
from tiered_kv_fs.posix import directories, occupied_bytes, opened, read_file, try_lock, unlock
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.volume import fields_of, read_version

_LOCK_TIMEOUT_S: Final = 5.0
_LOCK_POLL_S: Final = 0.02
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAMED_MAX: Final = 8
"""Entries that are left and named, of any number."""

_SMALL: Final = re.compile(rf"namespace\.json|epoch|{TEMPORARY.pattern}")
_LEVELS: Final[Sequence[tuple[re.Pattern[str] | None, re.Pattern[str] | None]]] = (
    (_SMALL, EPOCH),
    (None, SHARD),
    (re.compile(f"{BLOCK.pattern}|{TEMPORARY_BLOCK.pattern}"), None),
)
"""What a namespace's directory, an epoch's and a shard hold: the names of their files, and of their directories."""


@dataclass(slots=True)
class _Tally:
    """What was found, or removed."""

    blocks: int = 0
    size_bytes: int = 0
    kept: list[str] = field(default_factory=list)


class FsAdministration(TierAdministration):
    """The directory of an fs tier, which other processes may be using.

    Args:
        settings: The tier's YAML entry.
    """

    def __init__(self, settings: FsSettings) -> None:
        self._path = os.path.abspath(os.path.expanduser(settings.path))
        self._tier = settings.name
        self._is_private = settings.private

    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        with self._opened("list") as fd:
            if fd is None:
                return []
            tallies: dict[str, _Tally] = {}
            described: dict[str, Mapping[str, object]] = {}
            for digest, path in self._directories_of(only):
                tally = tallies.setdefault(digest, _Tally())
                _count(path, 0, tally, deadline)
                text = read_file(f"{path}/{NAMESPACE_NAME}", DESCRIPTION_BYTES_MAX)
                found = believed(fields_of(text or b"").get("namespace"), digest)
                described[digest] = found or described.get(digest, {})
            return [
                StoredNamespace(digest, described[digest], tally.blocks, tally.size_bytes)
                for digest, tally in sorted(tallies.items())
            ]

    def purge(self, digest: str, deadline: float) -> Purged:
        with self._opened("purge") as fd:
            if fd is None or not self._directories_of(digest):
                return Purged(0, 0)
            if self._is_private:  # what root made in another user's directory, that user's stacks would refuse
                check_directory(fd, self._path, may_tighten=False)
            with self._sweep_locked(deadline):
                return self._purge(fd, digest, deadline)

    def close(self) -> None:
        return  # nothing is kept open

    def _purge(self, fd: int, digest: str, deadline: float) -> Purged:
        ledger = Ledger(f"{self._path}/{LEDGER_NAME}", _LOCK_TIMEOUT_S)
        tally = _Tally()
        with ledger.locked() as state:
            count = state.count
            users = self._move_away(digest, state)
        try:
            for _, path in self._directories_of(digest, moved_only=True):
                name = os.path.basename(path)
                above = f"{self._path}/"
                while not _remove(fd, name, 0, tally, deadline, above) and not tally.kept:
                    if time.monotonic() >= deadline:
                        break
        finally:
            with ledger.locked() as state:
                if state.count == count:  # nobody has counted who may have missed what was removed: see `Sweeper`
                    state.take_off(tally.size_bytes, digest)
                if digest in state.shares:
                    # What an earlier purge had moved away was in the total, but in a share only if nobody has counted
                    # since. So nobody knows the share; who needs it counts.
                    state.shares[digest].total_bytes = None
                if not users:  # nobody has a grant in it
                    state.shares.pop(digest, None)
        return Purged(tally.blocks, tally.size_bytes, self._left(digest, tally), users)

    def _move_away(self, digest: str, state: LedgerState) -> tuple[str, ...]:
        """Give the namespace's directory another name, and return what is to be said of those who use it.

        What those have left who ended without a word goes too: it names the namespace, a host and a process. A reset
        that one of them left undone needs no doing any more.
        """
        owners_path = f"{self._path}/{OWNERS_NAME}"
        try:
            notes = [note for note in read_owners(owners_path) if note.namespace == digest]
        except (FileNotFoundError, NotADirectoryError):
            notes = []
        users = sum(note.is_alive for note in notes)
        try:
            os.rename(f"{self._path}/{digest}", f"{self._path}/.{digest}.{secrets.token_hex(8)}.purged")
        except FileNotFoundError:  # an earlier purge has moved it
            pass
        for note in notes:
            if not note.is_alive:
                remove_owner(owners_path, note.name)
                if state.grants.pop(note.name, 0):
                    state.total_bytes = None  # how much of the grant was used, only a count can tell
        return (f"{users} open stacks use this namespace; they go on, and may store in it again",) if users else ()

    def _left(self, digest: str, tally: _Tally) -> tuple[str, ...]:
        left = tally.kept[:_NAMED_MAX]
        if len(tally.kept) > _NAMED_MAX:
            left.append(f"{len(tally.kept) - _NAMED_MAX} more such entries")
        moved = [path for _, path in self._directories_of(digest, moved_only=True)]
        if moved and not left:
            left.append(f"the time was over before all in {moved[0]} was deleted; purge again")
        again = _Tally()
        for path in directories(self._path, re.compile(digest)):
            _count(path, 0, again, time.monotonic() + _LOCK_TIMEOUT_S)
        if again.blocks:
            left.append(f"{again.blocks} blocks, stored meanwhile by a stack that uses this namespace")
        return tuple(left)

    def _directories_of(self, only: str | None, *, moved_only: bool = False) -> list[tuple[str, str]]:
        """Return digest and path of each namespace's directory, those included that a purge has moved away."""
        found = [] if moved_only else [(os.path.basename(path), path) for path in directories(self._path, NAMESPACE)]
        for path in directories(self._path, PURGED):
            match = PURGED.fullmatch(os.path.basename(path))
            assert match is not None, "they were looked for by this pattern"
            found.append((match["namespace"], path))
        return [(digest, path) for digest, path in found if only in (None, digest)]

    @contextmanager
    def _opened(self, operation: str) -> Iterator[int | None]:
        """Yield the directory, None if there is none; errors of the file system are the tier's."""
        try:
            try:
                fd = open_directory(self._path, make=False)
            except FileNotFoundError:
                yield None
                return
            try:
                names = os.listdir(fd)
                if MARKER_NAME in names:
                    read_version(self._path, self._tier)
                elif set(names) - {"lost+found"}:
                    raise FormatError(f"{self._path} is not a directory of this tier", tier=self._tier)
                yield fd if MARKER_NAME in names else None
            finally:
                os.close(fd)
        except OSError as error:
            raise TierUnavailableError(
                f"{self._path}: {error.strerror or error}", tier=self._tier, operation=operation
            ) from error

    @contextmanager
    def _sweep_locked(self, deadline: float) -> Iterator[None]:
        with opened(f"{self._path}/{SWEEP_NAME}", os.O_RDWR | os.O_CREAT) as fd:
            check_file(fd, f"{self._path}/{SWEEP_NAME}", any_owner=True)
            while not try_lock(fd):
                if time.monotonic() >= deadline:
                    raise TimeoutError(None, "another process has been making room all the time; purge again")
                time.sleep(_LOCK_POLL_S)
            try:
                yield
            finally:
                unlock(fd)


def _count(path: str, level: int, tally: _Tally, deadline: float) -> None:
    """Add the blocks in a directory, and what its files occupy, as far as the deadline lets."""
    files, inner = _LEVELS[level]
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if time.monotonic() >= deadline:
                    raise TimeoutError(None, f"counting what is in {path} takes too long")
                if entry.is_dir(follow_symlinks=False):
                    if inner is not None and inner.fullmatch(entry.name):
                        _count(entry.path, level + 1, tally, deadline)
                elif files is not None and files.fullmatch(entry.name):
                    try:
                        tally.size_bytes += occupied_bytes(entry.stat(follow_symlinks=False))
                    except FileNotFoundError:
                        continue
                    tally.blocks += BLOCK.fullmatch(entry.name) is not None
    except FileNotFoundError:  # removed meanwhile
        return


def _remove(parent_fd: int, name: str, level: int, tally: _Tally, deadline: float, above: str) -> bool:
    """Delete what is this tier's in a directory, and the directory; return whether it is gone.

    Symbolic links are not followed: every step is relative to a directory that has been opened.
    """
    files, inner = _LEVELS[level]
    path = f"{above}{name}"
    try:
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        return True
    try:
        for entry in os.listdir(fd):
            if time.monotonic() >= deadline:
                return False
            try:
                status = os.stat(entry, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:  # a file that was being written has got its name
                continue
            if stat.S_ISDIR(status.st_mode) and inner is not None and inner.fullmatch(entry):
                _remove(fd, entry, level + 1, tally, deadline, f"{path}/")
            elif not stat.S_ISDIR(status.st_mode) and files is not None and files.fullmatch(entry):
                _unlink(fd, entry, status, tally, path)
            else:
                tally.kept.append(f"{path}/{entry}, which is not this tier's")
    finally:
        os.close(fd)
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # of no use to try again
            raise
        return False
    return True


def _unlink(fd: int, name: str, status: os.stat_result, tally: _Tally, path: str) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        return
    tally.blocks += BLOCK.fullmatch(name) is not None
    if status.st_nlink > 1:
        tally.kept.append(
            f"{path}/{name} had {status.st_nlink - 1} more names (hard links), under which its bytes remain"
        )
    else:
        tally.size_bytes += occupied_bytes(status)
