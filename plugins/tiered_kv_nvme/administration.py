"""Administration of a directory without a stack: survey, verify and purge its blocks.

The commands of `tiered_kv.cli` that look into a storage call it, each on its own thread. These things stay true:

- A purge and a repair hold the directory's lock, so no stack has the directory open. A survey changes nothing.
- A purge that was interrupted can be repeated: it deletes the segment files, then the epoch, then the marker.
- The lock file stays, because another process may wait for it. The marker stays beside foreign files: without it a tier
  would refuse the directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial

from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierBusyError
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.system.file_systems import is_full, is_stuck
from tiered_kv.toolkit.administration import (
    DIGEST_HEX,
    Purged,
    StoredBlock,
    StoredNamespace,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.census import Census
from tiered_kv.toolkit.claimed import LOST_AND_FOUND, Identity
from tiered_kv.toolkit.small_files import names_in
from tiered_kv_nvme.directory import (
    INDEX_NAME,
    LOCK_NAME,
    MARKER_NAME,
    OWN_NAMES,
    SegmentDirectory,
    claimed_directory,
    release_lock,
    remove_leftovers,
    segment_pattern,
    take_lock,
)
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.inspection import Inspection
from tiered_kv_nvme.records import StoredRecords
from tiered_kv_nvme.settings import NvmeSettings


class NvmeAdministration(TierAdministration):
    """The directory of an nvme tier. Purges and repairs need its lock; surveys do not."""

    def __init__(self, settings: NvmeSettings) -> None:
        super().__init__(settings)
        self._claimed = claimed_directory(settings.path, settings.name, private=settings.private)
        self._path = self._claimed.path

    @property
    def where(self) -> str:
        return self._path if os.path.exists(self._path) else f"{self._path} (no such directory)"

    def namespaces(self, deadline: float) -> Sequence[StoredNamespace]:
        with self._claimed.opened("survey") as fd:
            digest, fields = self._marker(fd)
        return [StoredNamespace(digest, matching_description(fields.get("namespace"), digest))] if digest else []

    def purge(self, digest: str, deadline: float) -> Purged:
        with self._claimed.opened("purge") as fd:
            if fd is None:
                return Purged(0, 0)
            is_marked = MARKER_NAME in names_in(fd)
            names = {name for name, _ in _segments(fd, digest)}
            if not is_marked and not names:
                return Purged(0, 0)
            # refuses another user's directory: a lock file of root must not stay there
            replace(self._claimed, own_names=OWN_NAMES | names).check(fd)
            lock_fd = take_lock(fd, self._claimed)
            try:
                found = self._marker(fd)[0] if is_marked else digest  # a full disk may have refused the marker
                return self._purge(fd, digest, deadline) if found == digest else Purged(0, 0)
            finally:
                release_lock(lock_fd, fd)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census = Census()
        with self._claimed.opened("survey") as fd:
            inspection = self._inspection(fd, only, deadline)
            segments = None if inspection is None else inspection.count(census)
        return census.survey(lambda _: inspection and inspection.identity.namespace, segments)

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        with self._claimed.opened("verify") as fd:
            inspection = self._inspection(fd, digest, deadline)
            if inspection is None:
                return
            verification.checks_tags = True
            with closing(self._owned(inspection.identity)) if verification.repairs else nullcontext() as owned:
                inspection.verify(self._settings.open_codecs(), verification, owned)

    def blocks(
        self, digest: str, keys: Collection[OffloadKey] | None, deadline: float
    ) -> Iterator[Sequence[StoredBlock]]:
        with self._claimed.opened("copy") as fd:
            inspection = self._inspection(fd, digest, deadline)
            if inspection is not None:
                yield from StoredRecords(inspection).blocks(None if keys is None else frozenset(keys))

    def read_records(
        self, digest: str, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], deadline: float
    ) -> Sequence[RecordStatus | str]:
        with self._claimed.opened("copy") as fd:
            inspection = self._inspection(fd, digest, deadline)
            if inspection is None:
                return [Reason.ABSENT] * len(blocks)
            return StoredRecords(inspection).read(blocks, rows)

    def _owned(self, identity: Identity) -> SegmentDirectory:
        try:
            return SegmentDirectory(self._path, identity, tier=self._claimed.tier, private=self._claimed.private)
        except TierBusyError as error:
            message = f"{error.message.partition(';')[0]}; stop it first, or leave --repair out"
            raise TierBusyError(message, tier=self._claimed.tier, operation="repair") from error

    def _inspection(self, fd: int | None, digest: str | None, deadline: float) -> Inspection | None:
        """Return the inspection of the directory's namespace; None if it has none, or another than `digest`."""
        found, fields = self._marker(fd)
        if fd is None or not found or digest not in (None, found):
            return None
        block_bytes, namespace = fields.get("block_bytes"), fields.get("namespace")
        if not isinstance(block_bytes, int) or not 0 < block_bytes < 1 << 32:
            raise self._claimed.format_error(f"{self._path}/{MARKER_NAME} names no possible size of blocks")
        identity = Identity(bytes.fromhex(found), namespace if isinstance(namespace, Mapping) else {}, block_bytes)
        return Inspection(fd, self._claimed, identity, partial(self.check_time, deadline))

    def _purge(self, fd: int, digest: str, deadline: float) -> Purged:
        size_bytes = 0
        left: list[str] = []
        stuck: set[str] = set()
        for name, status in _segments(fd, digest):
            if time.monotonic() >= deadline:
                left.append("the time was over before all segments were deleted; purge again")
                break
            try:
                os.unlink(name, dir_fd=fd)
            except OSError as error:
                if not is_stuck(error):
                    raise
                stuck.add(name)
                left.append(f"{self._path}/{name} cannot be deleted: {error.strerror}")
                continue
            if status.st_nlink > 1:
                left.append(f"{name} has {status.st_nlink - 1} more names (hard links), under which its bytes remain")
            else:
                size_bytes += status.st_blocks * 512
        if remaining := len(_segments(fd, digest)) - len(stuck):
            left.append(f"{remaining} segment files in {self._path}")
            return Purged(None, size_bytes, tuple(left))
        remove_leftovers(fd)
        for name in (INDEX_NAME, EPOCH_NAME):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        notes: tuple[str, ...] = ()
        foreign = Census()
        for name in sorted(set(names_in(fd)) - {LOCK_NAME, MARKER_NAME, LOST_AND_FOUND} - stuck):
            foreign.add_foreign(f"{self._path}/{name}", 0)
        if (lines := foreign.left()) or stuck:
            left += lines
            notes = (f"{self._path}/{MARKER_NAME}, which says whose blocks these were, stays beside other files",)
        else:
            with suppress(FileNotFoundError):
                os.unlink(MARKER_NAME, dir_fd=fd)
        try:
            os.fsync(fd)
        except OSError as error:
            if not is_full(error):
                raise
        return Purged(None, size_bytes, tuple(left), notes)

    def _marker(self, fd: int | None) -> tuple[str, Mapping[str, object]]:
        """Return the digest of the namespace and the marker's fields; "" if there is no directory or no marker.

        Raises `FormatError`: the marker is damaged or of another format version, or is missing beside foreign files.
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
        for name in sorted(names_in(fd))
        if pattern.fullmatch(name)
    ]
