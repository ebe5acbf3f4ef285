"""The directory of a tier: its lock, its marker, and its files; see docs/reference/formats-nvme.md."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final, NamedTuple

from tiered_kv.config.namespace import differences
from tiered_kv.permissions import open_directory
from tiered_kv.toolkit.claimed import TEMPORARY, ClaimedDirectory, Identity, absolute, refuse_other_device, walk
from tiered_kv.toolkit.small_files import as_text, fields_of
from tiered_kv_nvme.disk import PROBE_NAME, has_name
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.layout import FORMAT_VERSION
from tiered_kv_nvme.lock import LOCK_NAME, release_lock, take_lock

MARKER_NAME: Final = "tiered-kv-nvme.json"

DIRECTORY_RESERVE_BYTES: Final = 64 << 10
"""Part of the capacity for the small files, the directory and its growth."""
SEGMENT_RESERVE_BYTES: Final = 8 << 10
"""Part of the capacity for the file system's notes about each segment's extents."""

OWN_NAMES: Final = frozenset({LOCK_NAME, MARKER_NAME, EPOCH_NAME, PROBE_NAME})


class Listing(NamedTuple):
    """The slots of a directory's segment files, and the space of everything in it."""

    segments: list[int]
    used_bytes: int  # occupied on the device now
    claimed_bytes: int  # occupied at most until another file is made: holes filled, reserves used


def claimed_directory(path: str, tier: str, *, private: bool) -> ClaimedDirectory:
    return ClaimedDirectory(absolute(path), MARKER_NAME, FORMAT_VERSION, OWN_NAMES, tier, private)


def segment_pattern(digest: bytes) -> re.Pattern[str]:
    """Return the pattern of the names of a namespace's segment files; its group is the slot."""
    return re.compile(rf"segment-{digest[:4].hex()}-(\d{{6}})\.kv")


class Directory:
    """A locked directory. Opening makes a missing one, and claims an empty one.

    Raises:
        ConfigError: It is a symbolic link, or another user controls it; see `tiered_kv.permissions`.
        TierBusyError: Another process, or another tier of this process, owns it.
        FormatError: It has another format version or namespace, or holds foreign files and no marker.
        TierUnavailableError: The file system failed.
    """

    def __init__(self, path: str, identity: Identity, *, tier: str = "", private: bool = True) -> None:
        self.claimed = claimed_directory(path, tier, private=private)
        self.path = self.claimed.path
        self.identity = identity
        self.foreign_files = 0
        """Foreign entries in the last listing."""
        self._pattern = segment_pattern(identity.digest)
        try:
            with ExitStack() as undo:
                self.fd = open_directory(self.path)
                undo.callback(os.close, self.fd)
                self._lock_fd = self._claim(self.fd)
                undo.pop_all()
        except OSError as error:
            raise self.claimed.unavailable(error) from error

    def segment_name(self, slot: int) -> str:
        return f"segment-{self.identity.digest[:4].hex()}-{slot:06d}.kv"

    def list(self) -> Listing:
        """List the directory. Any thread may call. Raises `OSError`."""
        segments: list[int] = []
        own_bytes = os.fstat(self.fd).st_blocks * 512
        segment_bytes = claimed_bytes = foreign_bytes = foreign_files = 0
        for entries in walk(f"/proc/self/fd/{self.fd}"):
            for name, status in entries:
                occupied_bytes = status.st_blocks * 512
                if match := self._pattern.fullmatch(name):
                    segments.append(int(match[1]))
                    segment_bytes += occupied_bytes
                    claimed_bytes += max(status.st_size + SEGMENT_RESERVE_BYTES, occupied_bytes)
                elif name in OWN_NAMES:
                    own_bytes += occupied_bytes
                else:
                    foreign_files += "/" not in name
                    foreign_bytes += occupied_bytes
        self.foreign_files = foreign_files
        claimed_bytes += foreign_bytes + max(own_bytes, DIRECTORY_RESERVE_BYTES)
        used_bytes = segment_bytes + foreign_bytes + own_bytes
        return Listing(sorted(segments), used_bytes, claimed_bytes)

    def remake(self) -> None:
        """Make again what somebody has deleted: the directory, its lock, its marker. The reclaimer's thread.

        The descriptors keep their numbers.

        Raises:
            TieredKVError: Another process has made it, or it cannot be claimed.
            OSError: The file system refuses, or another one is mounted there now.
        """
        if has_name(self.path, None, self.fd):
            if not has_name(LOCK_NAME, self.fd, self._lock_fd):
                self._replace_lock(take_lock(self.fd, self.claimed))
            names = frozenset(os.listdir(self.fd))
            if MARKER_NAME not in names:  # what else is in it was accepted at the opening
                self._check_marker(replace(self.claimed, own_names=names), self.fd)
            return
        refuse_other_device(self.path, os.fstat(self.fd).st_dev)
        fd = open_directory(self.path)
        try:
            self._replace_lock(self._claim(fd))
            os.dup2(fd, self.fd, inheritable=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        release_lock(self._lock_fd, self.fd)
        os.close(self.fd)

    def _claim(self, fd: int) -> int:
        """Check, lock and mark a directory; return the descriptor of its lock file."""
        # Segments need no marker: a cleaner that deletes by age takes the small files first.
        segments = {name for name in os.listdir(fd) if self._pattern.fullmatch(name)}
        claimed = replace(self.claimed, own_names=OWN_NAMES | segments)
        claimed.check(fd)
        lock_fd = take_lock(fd, claimed)
        with ExitStack() as undo:
            undo.callback(release_lock, lock_fd, fd)
            remove_leftovers(fd)
            self._check_marker(claimed, fd)
            undo.pop_all()
        return lock_fd

    def _replace_lock(self, lock_fd: int) -> None:
        os.dup2(lock_fd, self._lock_fd, inheritable=False)
        os.close(lock_fd)

    def _check_marker(self, claimed: ClaimedDirectory, fd: int) -> None:
        wanted = self.identity.fields()
        found = claimed.mark(fd, wanted)
        if found is None:
            os.fsync(fd)
        elif any(found.get(name) != wanted[name] for name in ("namespace_digest", "block_bytes")):
            raise self.claimed.format_error(
                f"{self.path} holds blocks of another namespace ({_difference(found, wanted)}); "
                "give each namespace its own directory"
            )


def remove_leftovers(directory_fd: int) -> None:
    """Remove temporary files that a crash while opening may have left. Needs the lock."""
    for name in os.listdir(directory_fd):
        if name == PROBE_NAME or (TEMPORARY.fullmatch(name) and MARKER_NAME in name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)


def _difference(found: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """Describe how two markers differ; the digest only if no other field differs."""
    both = differences(found, fields_of(as_text(wanted))).items()
    named = {name.replace("namespace.", ""): values for name, values in both}
    shown = {name: named[name] for name in named if name not in ("format", "namespace_digest")} or named
    return "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in shown.items())
