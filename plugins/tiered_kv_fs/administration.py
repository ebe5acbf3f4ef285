"""Administration of a shared directory without a stack: look at its namespaces, and delete one while others use it.

A purge takes these steps, and holds the sweep lock meanwhile:

1. Rename the namespace's directory to `.<namespace>.<n>.purged`. From then on its blocks are misses, and a process that
   stores makes a new directory.
2. Remove the namespace's holders from the ledger.
3. Delete the renamed directories, including those of an interrupted purge.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.tiering.administration import (
    DESCRIPTION_BYTES_MAX,
    Purged,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.claimed import LOST_AND_FOUND, TEMPORARY, walk
from tiered_kv.toolkit.inspection import Census, RecordCheck
from tiered_kv.toolkit.small_files import fields_of, opened, read_file
from tiered_kv.toolkit.status import RecordStatus
from tiered_kv_fs.directory import claimed
from tiered_kv_fs.files import locked, occupied_bytes, read_all, reason_of
from tiered_kv_fs.layout import (
    BLOCK,
    EPOCH,
    LEDGER_NAME,
    LOCK_NAME,
    MARKER_NAME,
    NAMESPACE_NAME,
    SHARD,
    SWEEP_NAME,
    TEMPORARY_BLOCK,
)
from tiered_kv_fs.ledger import Ledger
from tiered_kv_fs.settings import FsSettings

_NAMED_MAX: Final = 8
_UNTOLD: Final = "a block's file has one time, that of its last use; so it is unknown whether it was used again"
_TOP: Final = re.compile(r"(?P<moved>\.)?(?P<digest>[0-9a-f]{32})(?(moved)\.[0-9a-f]{16}\.purged)")
_OURS: Final = re.compile(
    rf"namespace\.json|epoch|{TEMPORARY.pattern}|{EPOCH.pattern}(/{SHARD.pattern})?"
    rf"|{EPOCH.pattern}/{SHARD.pattern}/({BLOCK.pattern}|{TEMPORARY_BLOCK.pattern})"
)
"""Paths below a namespace's directory."""
_BLOCK_PATH: Final = re.compile(f"{EPOCH.pattern}/{SHARD.pattern}/{BLOCK.pattern}")
_OWN: Final = re.compile(
    "|".join((*map(re.escape, (MARKER_NAME, LOCK_NAME, LEDGER_NAME, SWEEP_NAME)), TEMPORARY.pattern))
)
"""Paths of the whole directory."""


class FsAdministration(TierAdministration):
    """The directory of an fs tier, which other processes may be using."""

    def __init__(self, settings: FsSettings) -> None:
        self._settings = settings
        self._claimed = claimed(settings.path, settings.name, private=settings.private)
        self._path = self._claimed.path

    def purge(self, digest: str, deadline: float) -> Purged:
        with self._claimed.opened("purge") as fd:
            if fd is None or self._claimed.marker(fd) is None or not self._directories(fd, digest):
                return Purged(0, 0)
            self._claimed.check(fd)  # the user's stacks would refuse files that root made in the directory
            with locked(f"{self._path}/{SWEEP_NAME}", deadline - time.monotonic()):
                return self._purge(fd, digest, deadline)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census = Census()
        with self._claimed.opened("survey") as fd:
            if fd is None or self._claimed.marker(fd) is None:
                return Survey()
            for folder in [""] if only is None else [f"{name}/" for name in self._directories(fd, only)]:
                for name, status in _entries(f"{self._path}/{folder}", deadline):
                    _count(folder + name, status, census)
            return census.survey(lambda digest: self._described(fd, digest), _UNTOLD)

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        check = RecordCheck(bytes.fromhex(digest), self._settings.open_codecs(), verification.block_bytes)
        with self._claimed.opened("verify") as fd:
            if fd is None or self._claimed.marker(fd) is None:
                return
            if verification.repairs:
                self._claimed.check(fd)
            for path, status in _entries(f"{self._path}/{digest}", deadline):
                if stat.S_ISREG(status.st_mode) and _BLOCK_PATH.fullmatch(path):
                    self._verify_block(f"{self._path}/{digest}/{path}", check, verification)

    def _described(self, fd: int, digest: str) -> Mapping[str, object]:
        for name in self._directories(fd, digest):
            fields = fields_of(read_file(f"{self._path}/{name}/{NAMESPACE_NAME}", DESCRIPTION_BYTES_MAX))
            if described := matching_description(fields.get("namespace"), digest):
                return described
        return {}

    def _verify_block(self, path: str, check: RecordCheck, verification: Verification) -> None:
        try:
            with opened(path, os.O_RDONLY) as fd:
                status = os.fstat(fd)
                record, read_bytes = check.room(status.st_size), 0
                found: RecordStatus | str = check.too_long
                if self._settings.private and status.st_uid != os.geteuid():
                    found = "not_private"
                elif record is not None:
                    read_bytes = read_all(fd, [record])
                    found = check.check(record[:read_bytes])
        except FileNotFoundError:  # evicted meanwhile
            return
        except OSError as error:
            verification.note(reason_of(error), 0)
            return
        if verification.note(found, read_bytes):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), status):
                    os.unlink(path)
            verification.repaired += 1  # also where an engine has deleted it meanwhile

    def _purge(self, fd: int, digest: str, deadline: float) -> Purged:
        with suppress(FileNotFoundError):
            os.rename(f"{self._path}/{digest}", f"{self._path}/.{digest}.{secrets.token_hex(8)}.purged")
        ledger = Ledger(self._path)
        with ledger.locked() as state:
            users = [name for name, holder in state.holders.items() if holder.namespace == digest]
            for name in users:  # a running one registers again; the others must not stay
                del state.holders[name]
        deleted = _Deleted()
        try:
            for name in self._directories(fd, digest, only_moved=True):
                path = f"{self._path}/{name}"
                while os.path.isdir(path) and not deleted.left and time.monotonic() < deadline:  # some may be added
                    deleted.delete(path, deadline)
        finally:
            with ledger.locked() as state:
                state.take_off(deleted.size_bytes)
                if users:  # only a survey can find out how much of their grants they have used
                    state.surveyed_s = 0.0
        left = deleted.left[:_NAMED_MAX]
        if len(deleted.left) > _NAMED_MAX:
            left.append(f"{len(deleted.left) - _NAMED_MAX} more such entries")
        if not left and (moved := self._directories(fd, digest, only_moved=True)):
            left.append(f"the time was over before all in {self._path}/{moved[0]} was deleted; purge again")
        entries = _entries(f"{self._path}/{digest}", deadline)
        if stored := sum(_BLOCK_PATH.fullmatch(inner) is not None for inner, _ in entries):
            left.append(f"{stored} blocks, stored meanwhile by a stack that uses this namespace")
        note = f"{len(users)} stacks use this namespace, or ended a moment ago; who is open may store in it again"
        return Purged(deleted.blocks, deleted.size_bytes, tuple(left), (note,) if users else ())

    def _directories(self, fd: int, digest: str, *, only_moved: bool = False) -> list[str]:
        """Return the names of a namespace's directories: the one in use, and those that a purge has renamed."""
        matches = [match for name in sorted(os.listdir(fd), reverse=True) if (match := _TOP.fullmatch(name))]
        return [each[0] for each in matches if each["digest"] == digest and (each["moved"] or not only_moved)]


@dataclass(slots=True)
class _Deleted:
    """The deleted files, and those that were left."""

    blocks: int = 0
    size_bytes: int = 0
    left: list[str] = field(default_factory=list)

    def delete(self, path: str, deadline: float) -> None:
        """Delete this tier's files in a directory, and the directory."""
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
                    self.blocks += _BLOCK_PATH.fullmatch(inner) is not None
        for directory in reversed(directories):
            with suppress(OSError):  # it is not empty, or files were added meanwhile
                os.rmdir(directory)


def _count(path: str, status: os.stat_result, census: Census) -> None:
    top, _, inner = path.partition("/")
    match = _TOP.fullmatch(top)
    is_ours = _OURS.fullmatch(inner) if inner else stat.S_ISDIR(status.st_mode)
    if match is not None and is_ours and not stat.S_ISLNK(status.st_mode):
        is_block = stat.S_ISREG(status.st_mode) and _BLOCK_PATH.fullmatch(inner) is not None
        census.add(match["digest"], occupied_bytes(status), is_block, used_s=time.time() - status.st_mtime)
    elif not (_OWN.fullmatch(path) or path == LOST_AND_FOUND):
        census.add_foreign(path, occupied_bytes(status))


def _entries(path: str, deadline: float) -> Iterator[tuple[str, os.stat_result]]:
    for found in walk(path):
        if time.monotonic() >= deadline:
            raise TimeoutError(None, f"looking through {path} takes too long")
        yield from found
