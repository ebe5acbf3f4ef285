"""The directory of a tier: its lock, its marker, and its files; see docs/reference/formats-nvme.md."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple

from tiered_kv.config.namespace import differences
from tiered_kv.errors import TierBusyError
from tiered_kv.permissions import check_file, open_directory
from tiered_kv.toolkit.claimed import TEMPORARY, ClaimedDirectory, Identity, absolute, walk
from tiered_kv.toolkit.small_files import as_text, fields_of
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS, PROBE_NAME
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.layout import FORMAT_VERSION

LOCK_NAME: Final = "lock"
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
                self.claimed.check(self.fd)
                self._lock_fd = take_lock(self.fd, self.claimed)
                undo.callback(release_lock, self._lock_fd)
                remove_leftovers(self.fd)
                self._check_marker()
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

    def close(self) -> None:
        release_lock(self._lock_fd)
        os.close(self.fd)

    def _check_marker(self) -> None:
        wanted = self.identity.fields()
        found = self.claimed.mark(self.fd, wanted)
        if found is None:
            os.fsync(self.fd)
        elif any(found.get(name) != wanted[name] for name in ("namespace_digest", "block_bytes")):
            raise self.claimed.format_error(
                f"{self.path} holds blocks of another namespace ({_difference(found, wanted)}); "
                "give each namespace its own directory"
            )


def take_lock(directory_fd: int, claimed: ClaimedDirectory) -> int:
    """Lock an open directory; return the descriptor that holds the lock until `release_lock`.

    Raises:
        TierBusyError: Another process, or another tier of this process, holds it.
        OSError: The file system failed.
    """
    fd = os.open(LOCK_NAME, OPEN_FLAGS | os.O_NONBLOCK | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        check_file(fd, f"{claimed.path}/{LOCK_NAME}", any_owner=not claimed.private)  # before the first write to it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            whose = "another tier of this process, or by process" if owner == str(os.getpid()) else "process"
            message = f"{claimed.path} is in use by {whose} {owner}; give each tier its own directory"
            raise TierBusyError(message, tier=claimed.tier, operation="open") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        undo.pop_all()
    return fd


def release_lock(lock_fd: int) -> None:
    """Unlock and close. Closing alone would leave the lock with a child that was forked meanwhile."""
    with suppress(OSError):
        fcntl.flock(lock_fd, fcntl.LOCK_UN)
    os.close(lock_fd)


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
