"""A tier's directory without a stack: whose blocks it holds, and removing them.

A purge needs the directory's lock, so no stack has it open. It deletes the segment files, the epoch, and last the
marker, so that one that was cut off can be repeated. The empty directory can then be claimed for any namespace. Two
files stay: the lock, since another process may be waiting to look at it, and the marker where foreign files lie beside
it, since without it the directory would be refused as somebody else's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.permissions import NotPrivateError, check_directory, open_directory
from tiered_kv.tiering.administration import DIGEST_HEX, Purged, StoredNamespace, TierAdministration, believed
from tiered_kv_nvme.directory import (
    LEFTOVERS,
    LOCK_NAME,
    MARKER_NAME,
    Marker,
    read_marker,
    reason_and_remedy,
    take_lock,
)
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.settings import NvmeSettings

_NAMED_MAX: Final = 8
"""Entries that are left and named, of any number."""
_TOLERATED: Final = frozenset((LOCK_NAME, MARKER_NAME, "lost+found"))


class NvmeAdministration(TierAdministration):
    """The directory of an nvme tier. It is looked at without its lock, and purged with it.

    Args:
        settings: The tier's YAML entry.
    """

    def __init__(self, settings: NvmeSettings) -> None:
        self._path = os.path.abspath(os.path.expanduser(settings.path))
        self._tier = settings.name

    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        with self._opened("list") as fd:
            marker = None if fd is None else self._marker(fd)
            if fd is None or marker is None or only not in (None, marker.digest):
                return []
            digest = str(marker.digest)
            size_bytes = sum(status.st_blocks * 512 for _, status in _segments(fd, digest))
            return [StoredNamespace(digest, believed(marker.namespace, digest), None, size_bytes)]

    def purge(self, digest: str, deadline: float) -> Purged:
        with self._opened("purge") as fd:
            if fd is None or MARKER_NAME not in os.listdir(fd):
                return Purged(0, 0)
            check_directory(fd, self._path, may_tighten=False)  # a lock of root's would keep its user's stacks out
            lock_fd = take_lock(fd, self._path, self._tier)
            try:
                marker = self._marker(fd)
                if marker is None or marker.digest != digest:
                    return Purged(0, 0)
                return self._purge(fd, digest, deadline)
            finally:
                os.close(lock_fd)

    def close(self) -> None:
        return  # nothing is kept open

    def _purge(self, fd: int, digest: str, deadline: float) -> Purged:
        size_bytes = 0
        left: list[str] = []
        for name, status in _segments(fd, digest):
            if time.monotonic() >= deadline:
                left.append("the time was over before all segments were deleted; purge again")
                break
            os.unlink(name, dir_fd=fd)
            if status.st_nlink > 1:
                left.append(f"{name} has {status.st_nlink - 1} more names (hard links), under which its bytes remain")
            else:
                size_bytes += status.st_blocks * 512
        if remaining := len(_segments(fd, digest)):
            left.append(f"{remaining} segment files in {self._path}")
            return Purged(None, size_bytes, tuple(left))
        for name in (*LEFTOVERS, EPOCH_NAME):
            _unlink(name, fd)
        notes: tuple[str, ...] = ()
        if foreign := sorted(set(os.listdir(fd)) - _TOLERATED):
            left += [f"{self._path}/{name}, which is not this tier's" for name in foreign[:_NAMED_MAX]]
            if len(foreign) > _NAMED_MAX:
                left.append(f"{len(foreign) - _NAMED_MAX} more such entries")
            notes = (f"{self._path}/{MARKER_NAME}, which says whose blocks these were, stays beside foreign files",)
        else:
            _unlink(MARKER_NAME, fd)
        os.fsync(fd)
        return Purged(None, size_bytes, tuple(left), notes)

    def _marker(self, fd: int) -> Marker | None:
        """Return what the directory says of itself, None if it holds nothing of anybody's.

        Raises:
            FormatError: It is not a tier's, or of another format version.
        """
        try:
            marker = read_marker(fd, self._path)
        except FileNotFoundError:
            strangers = sorted(set(os.listdir(fd)) - _TOLERATED - {EPOCH_NAME, *LEFTOVERS})
            if strangers:
                raise FormatError(
                    f"{self._path} is not a directory of this tier (it holds {strangers[0]!r})", tier=self._tier
                ) from None
            return None
        except ValueError as error:
            raise FormatError(str(error), tier=self._tier) from error
        if not isinstance(marker.digest, str) or not DIGEST_HEX.fullmatch(marker.digest):
            raise FormatError(f"{self._path}/{MARKER_NAME} names no namespace", tier=self._tier)
        return marker

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
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            detail = str(error.strerror) if isinstance(error, NotPrivateError) else reason_and_remedy(error)
            raise TierUnavailableError(f"{self._path}: {detail}", tier=self._tier, operation=operation) from error


def _segments(fd: int, digest: str) -> list[tuple[str, os.stat_result]]:
    """Return the segment files of a namespace, by name."""
    pattern = re.compile(rf"segment-{digest[:8]}-\d{{6}}\.kv")
    return [
        (name, os.stat(name, dir_fd=fd, follow_symlinks=False))
        for name in sorted(os.listdir(fd))
        if pattern.fullmatch(name)
    ]


def _unlink(name: str, fd: int) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        pass
