"""The directory of a tier: its owner, its namespace, and its files.

    lock                          held with flock(2) by the owner; holds its process id
    tiered-kv-nvme.json           format version, namespace, block size
    epoch                         see epoch.py
    segment-<digest>-<slot>.kv    see layout.py; <digest> is the start of the namespace's digest

All other files are foreign: never changed, but counted against the capacity.
"""

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
"""Kept free of segments: the small files, and the directory itself and its growth."""
SEGMENT_RESERVE_BYTES: Final = 8 << 10
"""Kept free beside each segment: blocks in which the file system notes the file's extents."""

OWN_NAMES: Final = frozenset({LOCK_NAME, MARKER_NAME, EPOCH_NAME, PROBE_NAME})


class Listing(NamedTuple):
    """What lies in a directory: the slots of its segment files, and what everything in it takes.

    `used_bytes` is what all of it occupies on the device; `claimed_bytes`, what it may come to occupy without another
    file being made: holes filled, reserves used.
    """

    segments: list[int]
    used_bytes: int
    claimed_bytes: int


def claimed(path: str, tier: str) -> ClaimedDirectory:
    """Return the directory at `path` as this type of tier claims it."""
    return ClaimedDirectory(absolute(path), MARKER_NAME, FORMAT_VERSION, OWN_NAMES, tier)


class Directory:
    """An owned directory. It is made if it is missing, claimed if it is empty, and refused if it is another owner's.

    Raises:
        ConfigError: It is a symbolic link, another user's, or open to others; see `tiered_kv.permissions`.
        TierBusyError: Another process owns it.
        FormatError: It is of another format version or namespace, or holds files and is not this tier's at all.
        TierUnavailableError: The file system refuses.
    """

    def __init__(self, path: str, identity: Identity, *, tier: str = "") -> None:
        self.claimed = claimed(path, tier)
        self.path = self.claimed.path
        self.identity = identity
        self.foreign_files = 0
        """How many entries were foreign in the last listing."""
        self._pattern = re.compile(rf"segment-{identity.digest[:4].hex()}-(\d{{6}})\.kv")
        try:
            with ExitStack() as undo:
                self.fd = open_directory(self.path)
                undo.callback(os.close, self.fd)
                self.claimed.check(self.fd)
                self._lock_fd = take_lock(self.fd, self.path, tier)
                undo.callback(give_back, self._lock_fd)
                remove_leftovers(self.fd)
                self._check_marker()
                undo.pop_all()
        except OSError as error:
            raise self.claimed.unavailable(error) from error

    def segment_name(self, slot: int) -> str:
        """Return the file name of the segment in `slot`."""
        return f"segment-{self.identity.digest[:4].hex()}-{slot:06d}.kv"

    def list(self) -> Listing:
        """Return the current content. Any thread may call.

        Raises:
            OSError: It cannot be listed.
        """
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
        """Release the directory."""
        give_back(self._lock_fd)
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


def take_lock(directory_fd: int, path: str, tier: str) -> int:
    """Become the owner of an open directory; return the descriptor that holds its lock until `give_back`.

    Raises:
        TierBusyError: Another process, or another tier of this one, owns it.
        OSError: The file system does not let us.
    """
    fd = os.open(LOCK_NAME, OPEN_FLAGS | os.O_NONBLOCK | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
    with ExitStack() as undo:
        undo.callback(os.close, fd)  # a descriptor that is not closed would hold the lock for ever
        check_file(fd, f"{path}/{LOCK_NAME}")  # before the first write to it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(fd, path, tier) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        undo.pop_all()
    return fd


def give_back(lock_fd: int) -> None:
    """Unlock and close; closing alone would leave the lock with a child that was forked meanwhile."""
    with suppress(OSError):
        fcntl.flock(lock_fd, fcntl.LOCK_UN)
    os.close(lock_fd)


def remove_leftovers(directory_fd: int) -> None:
    """Remove files that a crash during an opening may have left; only the owner calls."""
    for name in os.listdir(directory_fd):
        if name == PROBE_NAME or (TEMPORARY.fullmatch(name) and MARKER_NAME in name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)


def _busy(lock_fd: int, path: str, tier: str) -> TierBusyError:
    owner = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
    whose = "another tier of this process, or by process" if owner == str(os.getpid()) else "process"
    message = f"{path} is in use by {whose} {owner}; give each tier its own directory"
    return TierBusyError(message, tier=tier, operation="open")


def _difference(found: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """Return the differences of two markers, for an error; the digest only if no other field differs."""
    both = differences(found, fields_of(as_text(wanted))).items()
    named = {name.replace("namespace.", ""): values for name, values in both}
    shown = {name: named[name] for name in named if name not in ("format", "namespace_digest")} or named
    return "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in shown.items())
