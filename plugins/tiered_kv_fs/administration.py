"""Administration of a shared directory without a stack, while other processes may use it.

A purge takes these steps while it holds the sweep lock:

1. Rename the namespace's directory to `.<namespace>.<n>.purged`. From then on its blocks are misses, and a process that
   stores makes a new directory.
2. Remove the namespace's holders from the ledger.
3. Delete the renamed directories, including those of an interrupted purge.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from tiered_kv.toolkit.administration import (
    DESCRIPTION_BYTES_MAX,
    Census,
    Purged,
    RecordCheck,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.claimed import walk
from tiered_kv.toolkit.small_files import fields_of, opened, read_file
from tiered_kv_fs.directory import claimed
from tiered_kv_fs.files import locked, occupied_bytes, read_all, reason_of, unlink_same
from tiered_kv_fs.layout import BLOCK_PATH, NAMESPACE_DIRECTORY, NAMESPACE_NAME, NAMESPACE_PATH, SHARED_PATH, SWEEP_NAME
from tiered_kv_fs.ledger import Ledger
from tiered_kv_fs.settings import FsSettings

_PATHS_SHOWN_MAX: Final = 8
_USES_UNKNOWN: Final = "a block's file has one time, that of its last use; so it is unknown whether it was used again"


class FsAdministration(TierAdministration):
    """The directory of an fs tier, which other processes may be using."""

    def __init__(self, settings: FsSettings) -> None:
        self._settings = settings
        self._claimed = claimed(settings.path, settings.name, private=settings.private)
        self._path = self._claimed.path

    def purge(self, digest: str, deadline: float) -> Purged:
        with self._claimed.opened("purge") as fd:
            if fd is None or self._claimed.marker(fd) is None or not self._directories(digest):
                return Purged(0, 0)
            self._claimed.check(fd)  # root would make files that the tiers of the directory's owner refuse
            with locked(f"{self._path}/{SWEEP_NAME}", deadline - time.monotonic()):
                return self._purge(digest, deadline)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census = Census()
        with self._claimed.opened("survey") as fd:
            if fd is None or self._claimed.marker(fd) is None:
                return Survey()
            for folder in [""] if only is None else [f"{name}/" for name in self._directories(only)]:
                for name, status in _entries(f"{self._path}/{folder}", deadline):
                    _count(folder + name, status, census)
            return census.survey(self._described, _USES_UNKNOWN)

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        check = RecordCheck(bytes.fromhex(digest), self._settings.open_codecs(), verification.block_bytes)
        with self._claimed.opened("verify") as fd:
            if fd is None or self._claimed.marker(fd) is None:
                return
            if verification.repairs:
                self._claimed.check(fd)
            for path, status in _entries(f"{self._path}/{digest}", deadline):
                if _is_block(path, status):
                    self._verify_block(f"{self._path}/{digest}/{path}", check, verification)

    def _described(self, digest: str) -> Mapping[str, object]:
        for name in self._directories(digest):
            fields = fields_of(read_file(f"{self._path}/{name}/{NAMESPACE_NAME}", DESCRIPTION_BYTES_MAX))
            if described := matching_description(fields.get("namespace"), digest):
                return described
        return {}

    def _verify_block(self, path: str, check: RecordCheck, verification: Verification) -> None:
        try:
            with opened(path, os.O_RDONLY) as fd:
                status = os.fstat(fd)
                record, read_bytes = check.room(status.st_size), 0
                found = check.too_long
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
            unlink_same(path, status)
            verification.repaired += 1  # also where an engine has deleted it meanwhile

    def _purge(self, digest: str, deadline: float) -> Purged:
        with suppress(FileNotFoundError):
            os.rename(f"{self._path}/{digest}", f"{self._path}/.{digest}.{secrets.token_hex(8)}.purged")
        ledger = Ledger(self._path)
        with ledger.locked() as state:
            users = [name for name, holder in state.holders.items() if holder.namespace == digest]
            for name in users:  # a running one registers again; the others must not stay
                del state.holders[name]
        deleted: Counter[str] = Counter()
        foreign: list[str] = []
        try:
            for name in self._directories(digest, only_moved=True):
                _delete(f"{self._path}/{name}", deadline, deleted, foreign)
        finally:
            with ledger.locked() as state:
                state.take_off(deleted["bytes"])
                if users:  # only a survey can find out how much of their grants they have used
                    state.surveyed_s = 0.0
        left = [f"{path}, which is not this tier's" for path in foreign[:_PATHS_SHOWN_MAX]]
        if len(foreign) > _PATHS_SHOWN_MAX:
            left.append(f"{len(foreign) - _PATHS_SHOWN_MAX} more such entries")
        if not foreign and (moved := self._directories(digest, only_moved=True)):
            left.append(f"{self._path}/{moved[0]}, which is not empty; purge again")
        if stored := sum(_is_block(*entry) for entry in _entries(f"{self._path}/{digest}", deadline)):
            left.append(f"{stored} blocks, stored meanwhile by a stack that uses this namespace")
        note = f"{len(users)} stacks use this namespace, or ended a moment ago; one that is open may store in it again"
        return Purged(deleted["blocks"], deleted["bytes"], tuple(left), (note,) if users else ())

    def _directories(self, digest: str, *, only_moved: bool = False) -> list[str]:
        """Return the names of a namespace's directories: the one in use, and those that a purge has renamed."""
        names = sorted(os.listdir(self._path), reverse=True)
        matches = [match for name in names if (match := NAMESPACE_DIRECTORY.fullmatch(name))]
        return [each[0] for each in matches if each["digest"] == digest and (each["moved"] or not only_moved)]


def _delete(root: str, deadline: float, deleted: Counter[str], foreign: list[str]) -> None:
    """Delete this tier's files below `root`, and the directories that are empty then."""
    directories = [root]
    for inner, status in _entries(root, deadline):
        path = f"{root}/{inner}"
        if not NAMESPACE_PATH.fullmatch(inner) or stat.S_ISLNK(status.st_mode):
            foreign.append(path)
        elif stat.S_ISDIR(status.st_mode):
            directories.append(path)
        else:
            with suppress(FileNotFoundError):
                os.unlink(path)
                deleted["bytes"] += occupied_bytes(status)
                deleted["blocks"] += _is_block(inner, status)
    for directory in reversed(directories):
        with suppress(OSError):  # it is not empty
            os.rmdir(directory)


def _count(path: str, status: os.stat_result, census: Census) -> None:
    top, _, inner = path.partition("/")
    match = NAMESPACE_DIRECTORY.fullmatch(top)
    is_ours = NAMESPACE_PATH.fullmatch(inner) if inner else stat.S_ISDIR(status.st_mode)
    if match is not None and is_ours and not stat.S_ISLNK(status.st_mode):
        used_s = time.time() - status.st_mtime
        census.add(match["digest"], occupied_bytes(status), int(_is_block(inner, status)), used_s=used_s)
    elif not SHARED_PATH.fullmatch(path):
        census.add_foreign(path, occupied_bytes(status))


def _is_block(path: str, status: os.stat_result) -> bool:
    """Return whether an entry below a namespace's directory is a block's file."""
    return stat.S_ISREG(status.st_mode) and BLOCK_PATH.fullmatch(path) is not None


def _entries(root: str, deadline: float) -> Iterator[tuple[str, os.stat_result]]:
    for found in walk(root):
        if time.monotonic() >= deadline:
            raise TimeoutError(None, f"looking through {root} takes too long")
        yield from found
