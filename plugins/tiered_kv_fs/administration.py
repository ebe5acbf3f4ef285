"""A shared directory without a stack: whose blocks it holds, and removing them while others use it.

A purge first gives the namespace's directory another name, `.<namespace>.<n>.purged`. From then on everything in it is
a miss, and whoever stores makes a new directory. Then it deletes what has been moved away. The next purge finds by its
name what this one did not finish. The sweep lock is held meanwhile.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.permissions import check_directory, open_directory
from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    Purged,
    StoredNamespace,
    TierAdministration,
    believed,
)
from tiered_kv_fs.directory import fields_of, read_version
from tiered_kv_fs.files import Found, occupied_bytes, read_file, walk
from tiered_kv_fs.layout import (
    BLOCK,
    EPOCH,
    LEDGER_NAME,
    LOCK_NAME,
    NAMESPACE_NAME,
    SHARD,
    SWEEP_NAME,
    TEMPORARY,
    TEMPORARY_BLOCK,
)
from tiered_kv_fs.ledger import Ledger
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.sweeper import sweep_locked

_LOCK_POLL_S: Final = 0.02
_NAMED_MAX: Final = 8
_TOP: Final = re.compile(r"(?P<moved>\.)?(?P<digest>[0-9a-f]{32})(?(moved)\.[0-9a-f]{16}\.purged)")
_OURS: Final = re.compile(
    rf"namespace\.json|epoch|{TEMPORARY.pattern}|{EPOCH.pattern}(/{SHARD.pattern})?"
    rf"|{EPOCH.pattern}/{SHARD.pattern}/({BLOCK.pattern}|{TEMPORARY_BLOCK.pattern})"
)
"""Paths below a namespace's directory."""


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
        found: dict[str, StoredNamespace] = {}
        try:
            for digest, path in self._directories(only):
                other = found.get(digest, StoredNamespace(digest, {}, 0, 0))
                blocks, size_bytes = _count(path, deadline)
                text = read_file(f"{path}/{NAMESPACE_NAME}", DESCRIPTION_BYTES_MAX)
                described = believed(fields_of(text or b"").get("namespace"), digest) or other.described
                found[digest] = StoredNamespace(
                    digest, described, blocks + (other.blocks or 0), size_bytes + (other.size_bytes or 0)
                )
        except OSError as error:
            raise self._unavailable(error, "list") from error
        return [found[digest] for digest in sorted(found)]

    def purge(self, digest: str, deadline: float) -> Purged:
        try:
            if not self._directories(digest):
                return Purged(0, 0)
            while time.monotonic() < deadline:
                with sweep_locked(f"{self._path}/{SWEEP_NAME}") as is_locked:
                    if is_locked:
                        return self._purge(digest, deadline)
                time.sleep(_LOCK_POLL_S)
            raise TimeoutError(None, "another process has been making room all the time; purge again")
        except OSError as error:
            raise self._unavailable(error, "purge") from error

    def close(self) -> None:
        return  # nothing is kept open

    def _purge(self, digest: str, deadline: float) -> Purged:
        with suppress(FileNotFoundError):
            os.rename(f"{self._path}/{digest}", f"{self._path}/.{digest}.{secrets.token_hex(8)}.purged")
        ledger = Ledger(f"{self._path}/{LEDGER_NAME}", f"{self._path}/{LOCK_NAME}")
        with ledger.locked() as state:
            users = [name for name, holder in state.holders.items() if holder.namespace == digest]
            for name in users:  # who lives comes back by itself; of the others nothing may be left
                del state.holders[name]
        purged = _Deleted()
        try:
            for _, path in self._directories(digest, only_moved=True):
                while os.path.isdir(path) and not purged.left and time.monotonic() < deadline:  # some may be added
                    purged.delete(path, deadline)
        finally:
            with ledger.locked() as state:
                state.take_off(purged.size_bytes)
                if users:  # what they have filled of their grants, only a survey can tell
                    state.surveyed_s = 0.0
        left = purged.left[:_NAMED_MAX]
        if len(purged.left) > _NAMED_MAX:
            left.append(f"{len(purged.left) - _NAMED_MAX} more such entries")
        if not left and (moved := self._directories(digest, only_moved=True)):
            left.append(f"the time was over before all in {moved[0][1]} was deleted; purge again")
        stored, _ = _count(f"{self._path}/{digest}", deadline)
        if stored:
            left.append(f"{stored} blocks, stored meanwhile by a stack that uses this namespace")
        note = f"{len(users)} stacks use this namespace, or ended a moment ago; who is open may store in it again"
        return Purged(purged.blocks, purged.size_bytes, tuple(left), (note,) if users else ())

    def _directories(self, only: str | None, *, only_moved: bool = False) -> list[tuple[str, str]]:
        """Return digest and path of each namespace's directory, those that a purge has moved away included."""
        try:
            fd = open_directory(self._path, make=False)
        except FileNotFoundError:
            return []
        try:
            names = set(os.listdir(fd)) - {"lost+found"}
            if names and read_version(self._path, self._tier) is None:
                raise FormatError(f"{self._path} is not a directory of this tier", tier=self._tier)
            if names and self._is_private:  # what root made in another user's, that user's stacks would refuse
                check_directory(fd, self._path, may_tighten=False)
        finally:
            os.close(fd)
        matches = [match for name in sorted(names) if (match := _TOP.fullmatch(name))]
        return [
            (match["digest"], f"{self._path}/{match[0]}")
            for match in matches
            if only in (None, match["digest"]) and (match["moved"] or not only_moved)
        ]

    def _unavailable(self, error: OSError, operation: str) -> TierUnavailableError:
        return TierUnavailableError(f"{self._path}: {error.strerror or error}", tier=self._tier, operation=operation)


@dataclass(slots=True)
class _Deleted:
    """What was deleted, and what was left."""

    blocks: int = 0
    size_bytes: int = 0
    left: list[str] = field(default_factory=list)

    def delete(self, path: str, deadline: float) -> None:
        """Delete what is this tier's in a directory, and the directory."""
        directories = [path]
        for inner, status in _entries(path, deadline):
            if not _OURS.fullmatch(inner) or stat.S_ISLNK(status.st_mode):
                self.left.append(f"{path}/{inner}, which is not this tier's")
            elif stat.S_ISDIR(status.st_mode):
                directories.append(f"{path}/{inner}")
            else:
                with suppress(FileNotFoundError):
                    os.unlink(f"{path}/{inner}")
                    self.size_bytes += occupied_bytes(status)
                    self.blocks += _is_block(inner)
        for directory in reversed(directories):
            with suppress(OSError):  # something is left in it, or was added meanwhile
                os.rmdir(directory)


def _count(path: str, deadline: float) -> tuple[int, int]:
    """Return the blocks below a directory, and what all files there occupy."""
    files = [each for each in _entries(path, deadline) if not stat.S_ISDIR(each[1].st_mode)]
    return sum(_is_block(inner) for inner, _ in files), sum(occupied_bytes(status) for _, status in files)


def _entries(path: str, deadline: float) -> Iterator[Found]:
    for found in walk(path):
        if time.monotonic() >= deadline:
            raise TimeoutError(None, f"looking through {path} takes too long")
        yield from found


def _is_block(path: str) -> bool:
    return BLOCK.fullmatch(os.path.basename(path)) is not None
