"""Administration of a directory without a stack: survey, verify and purge its blocks.

A purge needs the directory's lock, so no stack has it open. It deletes the segment files, then the epoch, then the
marker, so that an interrupted purge can be repeated. The lock file stays, because another process may wait for it.
The marker stays beside foreign files: without it the directory would be refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from typing import Final

from tiered_kv.errors import TierBusyError
from tiered_kv.toolkit.administration import (
    DIGEST_HEX,
    Census,
    Purged,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.claimed import LOST_AND_FOUND, Identity
from tiered_kv_nvme.directory import (
    MARKER_NAME,
    Directory,
    claimed_directory,
    remove_leftovers,
    segment_pattern,
)
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.inspection import Inspection
from tiered_kv_nvme.lock import LOCK_NAME, release_lock, take_lock
from tiered_kv_nvme.settings import NvmeSettings

_USES_UNKNOWN: Final = "only the process that has the directory open knows when a block was used"
_FOREIGN_NAMED_MAX: Final = 8


class NvmeAdministration(TierAdministration):
    """The directory of an nvme tier. Purges and repairs need its lock; surveys do not."""

    def __init__(self, settings: NvmeSettings) -> None:
        self._settings = settings
        self._claimed = claimed_directory(settings.path, settings.name, private=settings.private)
        self._path = self._claimed.path

    def purge(self, digest: str, deadline: float) -> Purged:
        with self._claimed.opened("purge") as fd:
            if fd is None or MARKER_NAME not in os.listdir(fd):
                return Purged(0, 0)
            self._claimed.check(fd)  # do not leave a lock file of root in another user's directory
            lock_fd = take_lock(fd, self._claimed)
            try:
                found, _ = self._marker(fd)
                return self._purge(fd, digest, deadline) if found == digest else Purged(0, 0)
            finally:
                release_lock(lock_fd, fd)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census, segments = Census(), None
        described: Mapping[str, object] = {}
        with self._claimed.opened("survey") as fd:
            digest, fields = self._marker(fd)
            if fd is not None and digest and only in (None, digest):
                described = matching_description(fields.get("namespace"), digest)
                identity = self._identity(digest, fields)
                segments = Inspection(
                    fd, self._path, self._claimed.tier, self._claimed.private, identity, deadline
                ).count(census)
        return census.survey(lambda _: described, _USES_UNKNOWN, segments)

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        with self._claimed.opened("verify") as fd:
            found, fields = self._marker(fd)
            if fd is None or found != digest:
                return
            verification.checks_tags = True
            identity = self._identity(digest, fields)
            with closing(self._owned(identity)) if verification.repairs else nullcontext() as owned:
                inspection = Inspection(fd, self._path, self._claimed.tier, self._claimed.private, identity, deadline)
                inspection.verify(self._settings.open_codecs(), verification, owned)

    def _owned(self, identity: Identity) -> Directory:
        try:
            return Directory(self._path, identity, tier=self._claimed.tier, private=self._claimed.private)
        except TierBusyError as error:
            message = f"a running process has {self._path}; stop it first, or leave --repair out"
            raise TierBusyError(message, tier=self._claimed.tier, operation="repair") from error

    def _identity(self, digest: str, fields: Mapping[str, object]) -> Identity:
        block_bytes, namespace = fields.get("block_bytes"), fields.get("namespace")
        if not isinstance(block_bytes, int) or not 0 < block_bytes < 1 << 32:
            raise self._claimed.format_error(f"{self._path}/{MARKER_NAME} names no possible size of blocks")
        return Identity(bytes.fromhex(digest), namespace if isinstance(namespace, Mapping) else {}, block_bytes)

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
        remove_leftovers(fd)
        with suppress(FileNotFoundError):
            os.unlink(EPOCH_NAME, dir_fd=fd)
        notes: tuple[str, ...] = ()
        if foreign := sorted(set(os.listdir(fd)) - {LOCK_NAME, MARKER_NAME, LOST_AND_FOUND}):
            left += [f"{self._path}/{name}, which is not this tier's" for name in foreign[:_FOREIGN_NAMED_MAX]]
            if len(foreign) > _FOREIGN_NAMED_MAX:
                left.append(f"{len(foreign) - _FOREIGN_NAMED_MAX} more such entries")
            notes = (f"{self._path}/{MARKER_NAME}, which says whose blocks these were, stays beside foreign files",)
        else:
            with suppress(FileNotFoundError):
                os.unlink(MARKER_NAME, dir_fd=fd)
        os.fsync(fd)
        return Purged(None, size_bytes, tuple(left), notes)

    def _marker(self, fd: int | None) -> tuple[str, Mapping[str, object]]:
        """Return the digest of the namespace and the marker's fields; "" if there is no directory or no marker.

        Raises:
            FormatError: The marker is damaged or of another format version, or is missing beside foreign files.
        """
        fields = None if fd is None else self._claimed.marker(fd)
        if fields is None:
            return "", {}
        digest = fields.get("namespace_digest")
        if not isinstance(digest, str) or not DIGEST_HEX.fullmatch(digest):
            raise self._claimed.format_error(f"{self._path}/{MARKER_NAME} names no namespace")
        return digest, fields


def _segments(fd: int, digest: str) -> list[tuple[str, os.stat_result]]:
    pattern = segment_pattern(bytes.fromhex(digest))
    return [
        (name, os.stat(name, dir_fd=fd, follow_symlinks=False))
        for name in sorted(os.listdir(fd))
        if pattern.fullmatch(name)
    ]
