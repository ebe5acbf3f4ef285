"""The shared directory: the calls to its file system, and its opening for one namespace.

    tiered-kv-fs.json                 the format version
    lock                              flock(2) while the ledger is read and written
    ledger                            bytes in use, and grants; see ledger.py
    sweep                             flock(2) by the one process that surveys, evicts or purges
    <namespace>/namespace.json        the namespace in readable form
    <namespace>/epoch                 the mark of the epoch; see tiered_kv/toolkit/epoch.py
    <namespace>/<epoch>/<shard>/<block>                     a block record
    <namespace>/<epoch>/<shard>/.<block>.<owner>.<n>.tmp    a block record while it is written

<namespace> is the namespace's digest, <block> a digest of the key, <shard> its first byte. No part of a key is part of
a path. Other files in the directory are foreign: the tier never changes them, but counts them.

Any thread may call the file system, except the scheduler's: all of these calls may wait.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Final, TypeAlias

from tiered_kv.reasons import Reason
from tiered_kv.system.permissions import DIRECTORY_MODE, check_directory, open_directory
from tiered_kv.toolkit.claimed import ClaimedDirectory, Identity, absolute, refuse_other_device
from tiered_kv.toolkit.small_files import (
    SMALL_FILE_BYTES_MAX,
    as_text,
    fields_of,
    names_in,
    opened,
    read_file,
    replace_file,
)
from tiered_kv_fs.allocation import Allocation
from tiered_kv_fs.full_disk import FULL, with_room
from tiered_kv_fs.locks import LostLockError
from tiered_kv_fs.names import LEDGER_NAME, LOCK_NAME, MARKER_NAME, NAMESPACE_NAME, SWEEP_NAME
from tiered_kv_fs.probe import probe

FORMAT_VERSION: Final = 1


class FileFailure(StrEnum):
    """Reasons of this tier alone; the value is the word in the counters."""

    STALE = "stale"
    READ_ONLY = "read_only"
    PERMISSION = "permission"
    NOT_A_FILE = "not_a_file"
    NOT_PRIVATE = "not_private"
    LOCK_LOST = "lock_lost"
    LAPSED = "lapsed"
    """The grant was not renewed in time."""


FileReason: TypeAlias = Reason | FileFailure

_REASONS: Final[Mapping[int, FileReason]] = {
    errno.ENOENT: Reason.MISSING,
    errno.ESTALE: FileFailure.STALE,
    errno.ENOSPC: Reason.NO_SPACE,
    errno.EDQUOT: Reason.NO_SPACE,
    errno.EROFS: FileFailure.READ_ONLY,
    errno.EACCES: FileFailure.PERMISSION,
    errno.EPERM: FileFailure.PERMISSION,
    errno.ELOOP: FileFailure.NOT_A_FILE,
    errno.ENXIO: FileFailure.NOT_A_FILE,
    errno.EISDIR: FileFailure.NOT_A_FILE,
    errno.ENOTDIR: FileFailure.NOT_A_FILE,
}


def claimed(path: str, tier: str, *, private: bool, required_mount: str | None = None) -> ClaimedDirectory:
    mount = absolute(required_mount) if required_mount else ""
    return ClaimedDirectory(absolute(path), MARKER_NAME, FORMAT_VERSION, frozenset(), tier, private, mount)


class Directory:
    """The shared directory, made if it is missing. If the disk is full and has no block to delete, files come later.

    Any thread may call, except the scheduler's: all calls may wait for the file system.

    Raises:
        ConfigError: The directory is a symbolic link, or must be private and is another user's or open to others.
        FormatError: The directory has another format version, or has foreign files and no marker.
        TierUnavailableError: The file system refuses.
    """

    def __init__(
        self,
        path: str,
        identity: Identity,
        *,
        tier: str = "",
        private: bool = True,
        required_mount: str | None = None,
    ) -> None:
        self.claimed = claimed(path, tier, private=private, required_mount=required_mount)
        self.allocation = Allocation()
        self.description: dict[str, object] = {}
        """The facts about the directory's place that `tiered-kv check` shows."""
        self.shortcomings: tuple[str, ...] = ()
        """Sentences for people: what the mount lacks, as found at the opening, and the remedy."""
        self._identity = identity
        self._place: tuple[int, int] | None = None  # device and inode of the directory
        self.path = self.claimed.path
        self.namespace = identity.digest.hex()
        self.namespace_path = f"{self.path}/{self.namespace}"
        try:
            self.make()
        except OSError as error:
            if self._place is None or error.errno not in FULL:  # else `GrantClient` makes the rest when there is space
                raise self.claimed.unavailable(error) from error
        with suppress(OSError), opened(self.path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            found = probe(fd, self.path)
            self.shortcomings = found.shortcomings
            if not found.has_links:
                self.description["hard_links"] = "no"

    def make(self) -> None:
        """Check the directory, and make missing files in it.

        Raises:
            ConfigError, FormatError: As the constructor.
            OSError: The file system refuses, or another file system is mounted there now.
        """
        if self._place is not None:
            refuse_other_device(self.path, self._place[0])
        fd, missing = self.claimed.make()
        try:
            self.description = self.description or self.claimed.describe(fd, missing)
            status = os.fstat(fd)
            place = status.st_dev, status.st_ino
            claimed = self.claimed
            # The files in the same directory were accepted at the opening: only the marker is missing.
            if self._place == place and os.path.isdir(self.namespace_path):
                claimed = replace(claimed, own_names=frozenset(names_in(fd)))
            claimed.check(fd)
            self._place = place
            # `GrantClient` may make these files before the marker: after somebody has removed the directory, or where
            # the disk was full when the directory was new.
            self.claimed = replace(self.claimed, own_names=frozenset({LOCK_NAME, LEDGER_NAME, SWEEP_NAME}))
            with_room(self.path, partial(claimed.mark, fd, {"tier": "fs"}))
        finally:
            os.close(fd)
        with_room(self.path, self._make_namespace)
        for path in self._marks:  # a file of a few bytes occupies one allocation unit
            with suppress(FileNotFoundError):
                self.allocation.learn(os.lstat(path))

    @property
    def _marks(self) -> tuple[str, str]:
        return f"{self.path}/{MARKER_NAME}", f"{self.namespace_path}/{NAMESPACE_NAME}"

    def is_marked(self) -> bool:
        """Return whether the marker and `namespace.json` exist: a cleaner or a purge may have deleted them."""
        return all(map(os.path.lexists, self._marks))

    def _make_namespace(self) -> None:
        make_directory(self.namespace_path)
        if os.path.islink(self.namespace_path):
            raise self.claimed.format_error(f"{self.namespace_path} is a symbolic link; remove it")
        if self.claimed.private:
            fd = open_directory(self.namespace_path, make=False)
            try:
                check_directory(fd, self.namespace_path, names_in(fd))
            finally:
                os.close(fd)
        path = f"{self.namespace_path}/{NAMESPACE_NAME}"
        found = fields_of(read_file(path, SMALL_FILE_BYTES_MAX)).get("block_bytes")
        if found is None:
            replace_file(path, as_text(self._identity.fields()))
        elif found != self._identity.block_bytes:
            raise self.claimed.format_error(
                f"{self.namespace_path} holds blocks of {found} bytes, and these have {self._identity.block_bytes}; "
                "give blocks of another size another namespace or another directory"
            )


def reason_of(error: OSError) -> FileReason:
    if isinstance(error, TimeoutError | LostLockError):
        return Reason.TIMEOUT if isinstance(error, TimeoutError) else FileFailure.LOCK_LOST
    return _REASONS.get(error.errno or 0, Reason.IO_ERROR)


def make_directory(path: str) -> bool:
    """Make a directory with mode 0700; return False if it exists."""
    with suppress(FileExistsError):
        os.mkdir(path, DIRECTORY_MODE)
        return True
    return False


def unlink_same(path: str, status: os.stat_result) -> None:
    """Remove a file if it is still the file that `status` describes: another process may have replaced it."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), status):
            os.unlink(path)
