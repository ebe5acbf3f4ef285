"""The directory of a tier: its lock, its marker, and the list of its files; see docs/reference/formats-nvme.md.

The store opens it. Later the reclaimer lists it, and replaces deleted files. Any thread but the scheduler's may call,
since each call does I/O. These things stay true:

- One process at a time holds the lock, and a forked child does not keep it.
- A directory of another namespace, another tier type or another format is refused, and stays as it is.
- Foreign files count for the capacity, and are never changed.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final, NamedTuple

from tiered_kv.config.namespace import differences
from tiered_kv.errors import TierBusyError
from tiered_kv.system.file_systems import is_full, is_held, is_written_in_place, mount_of, write_in_place
from tiered_kv.system.permissions import check_file
from tiered_kv.toolkit.claimed import TEMPORARY, ClaimedDirectory, Identity, absolute, refuse_other_device, walk
from tiered_kv.toolkit.small_files import as_text, fields_of, has_name, names_in, remove
from tiered_kv_nvme.direct import PROBE_NAME
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.layout import FORMAT_VERSION

LOCK_NAME: Final = "lock"
MARKER_NAME: Final = "tiered-kv-nvme.json"
INDEX_NAME: Final = "index"  # see `saved_index`

DIRECTORY_RESERVE_BYTES: Final = 64 << 10  # part of the capacity for the small files, the directory and its growth
SEGMENT_RESERVE_BYTES: Final = 8 << 10  # part of the capacity for the file system's notes about each segment's extents

OWN_NAMES: Final = frozenset({LOCK_NAME, MARKER_NAME, EPOCH_NAME, INDEX_NAME, PROBE_NAME})

_TEXT_BYTES_MAX: Final = 128
_CLEANER_S: Final = 0.5
"""How long a cleaner such as systemd-tmpfiles may hold the directory's lock while it looks into it."""
_POLL_S: Final = 0.02


class Listing(NamedTuple):
    """The slots of a directory's segment files, and the space of everything in it."""

    segments: list[int]
    used_bytes: int  # occupied on the device now
    claimed_bytes: int
    """The most that these files may come to occupy, with all holes filled and all reserves used."""


def claimed_directory(path: str, tier: str, *, private: bool, required_mount: str | None = None) -> ClaimedDirectory:
    mount = absolute(required_mount) if required_mount else ""
    return ClaimedDirectory(absolute(path), MARKER_NAME, FORMAT_VERSION, OWN_NAMES, tier, private, mount)


def segment_pattern(digest: bytes) -> re.Pattern[str]:
    """Return the pattern of the names of a namespace's segment files; its group is the slot."""
    return re.compile(rf"segment-{digest[:4].hex()}-(\d{{6}})\.kv")


def segment_name(digest: bytes, slot: int) -> str:
    """Return the name of a namespace's segment file."""
    return f"segment-{digest[:4].hex()}-{slot:06d}.kv"


class SegmentDirectory:
    """A locked directory. Opening makes a missing one, and claims an empty one.

    Raises:
        ConfigError: It is a symbolic link, or another user controls it; see `tiered_kv.system.permissions`.
        TierBusyError: Another process, or another tier of this process, owns it.
        FormatError: It has another format version or namespace, or holds foreign files and no marker.
        TierUnavailableError: The file system failed, or a required mount is missing.
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
        self.claimed = claimed_directory(path, tier, private=private, required_mount=required_mount)
        self.path = self.claimed.path
        self.identity = identity
        self.foreign_files = 0  # foreign entries in the last listing
        self._pattern = segment_pattern(identity.digest)
        try:
            with ExitStack() as undo:
                self.fd, missing = self.claimed.make()
                undo.callback(os.close, self.fd)
                self.mount = mount_of(self.fd)
                self.description = self.claimed.describe(self.fd, missing)
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

    def copies_on_write(self, fd: int) -> bool:
        """Return whether each overwrite of a segment file takes new space."""
        return self.mount is not None and self.mount.copies_on_write and not is_written_in_place(fd)

    def remake(self) -> None:
        """Make deleted parts again: the directory, its lock, its marker. The reclaimer's thread.

        The descriptors keep their numbers.

        Raises:
            TieredKVError: Another process has made it, or it cannot be claimed.
            OSError: The file system refuses, or another one is mounted there now.
        """
        if has_name(self.path, self.fd):
            if not has_name(LOCK_NAME, self._lock_fd, dir_fd=self.fd):
                self._replace_lock(take_lock(self.fd, self.claimed))
            names = frozenset(names_in(self.fd))
            if MARKER_NAME not in names:  # the other files in it were accepted at the opening
                self._check_marker(replace(self.claimed, own_names=names), self.fd)
            return
        refuse_other_device(self.path, os.fstat(self.fd).st_dev)
        fd, _ = self.claimed.make()
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
        # A directory with segments and no marker is ours: a cleaner that deletes by age takes the small files first.
        segments = {name for name in names_in(fd) if self._pattern.fullmatch(name)}
        claimed = replace(self.claimed, own_names=OWN_NAMES | segments)
        claimed.check(fd)
        if self.mount is not None and self.mount.copies_on_write:
            write_in_place(fd)
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
        try:
            found = claimed.mark(fd, wanted)
            if found is None:
                os.fsync(fd)
        except OSError as error:
            if not is_full(error):
                raise
            return  # `remake` tries again; until then, the names and headers of segments show the namespace
        if found is None:
            return
        if any(found.get(name) != wanted[name] for name in ("namespace_digest", "block_bytes")):
            raise self.claimed.format_error(
                f"{self.path} holds blocks of another namespace ({_difference(found, wanted)}); "
                "give each namespace its own directory"
            )


def remove_leftovers(directory_fd: int) -> None:
    """Remove temporary files that a crash while opening may have left. Needs the lock."""
    for name in names_in(directory_fd):
        if name == PROBE_NAME or (TEMPORARY.fullmatch(name) and MARKER_NAME in name):
            remove(name, dir_fd=directory_fd)


def _difference(found: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """Describe how two markers differ; the digest only if no other field differs."""
    both = differences(found, fields_of(as_text(wanted))).items()
    named = {name.replace("namespace.", ""): values for name, values in both}
    shown = {name: named[name] for name in named if name not in ("format", "namespace_digest")} or named
    return "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in shown.items())


def take_lock(directory_fd: int, claimed: ClaimedDirectory) -> int:
    """Lock an open directory, by flock(2) on a file in it and on itself. `release_lock` undoes it.

    The file's lock is not enough: the file may be deleted, and another process may then make and lock a new one. The
    directory's lock is not enough either: network file systems lock only files that are open for writing. But
    systemd-tmpfiles deletes nothing below a locked directory.

    Returns:
        The descriptor of the lock file; of the directory, if its disk is full and has no such file.

    Raises:
        TierBusyError: Another process, or another tier of this process, holds it; the message says which.
        OSError: The file system failed.
    """
    try:
        fd = os.open(LOCK_NAME, OPEN_FLAGS | os.O_NONBLOCK | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
    except OSError as error:
        if not is_full(error):
            raise
        fd = os.dup(directory_fd)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            _lock_directory(directory_fd, fd, claimed)
            undo.pop_all()
        return fd
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        check_file(fd, f"{claimed.path}/{LOCK_NAME}", any_owner=not claimed.private)  # before the first write
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not is_held(error):
                raise
            raise _busy(fd, fd, claimed) from error
        _lock_directory(directory_fd, fd, claimed)
        with suppress(OSError):  # the disk is full: the text is for people only
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} on {socket.gethostname()}\n".encode()[:_TEXT_BYTES_MAX], 0)
        undo.pop_all()
    return fd


def release_lock(lock_fd: int, directory_fd: int) -> None:
    """Unlock both, and close the lock file. If it were only closed, a child that was forked would keep both locks."""
    for fd in (directory_fd, lock_fd):
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(lock_fd)


def _lock_directory(directory_fd: int, lock_fd: int, claimed: ClaimedDirectory) -> None:
    deadline = time.monotonic() + _CLEANER_S
    while True:
        try:
            fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not is_held(error):  # a network file system: the file's lock must do
                return
            if time.monotonic() >= deadline:
                raise _busy(directory_fd, lock_fd, claimed) from error
            time.sleep(_POLL_S)
        else:
            return


def _busy(locked_fd: int, lock_fd: int, claimed: ClaimedDirectory) -> TierBusyError:
    message = f"{claimed.path} is in use by {_holder(locked_fd, lock_fd)}; stop it, or give this tier another directory"
    return TierBusyError(message, tier=claimed.tier, operation="open")


def _holder(locked_fd: int, lock_fd: int) -> str:
    """Return a sentence about the process that holds the lock of an open file, as far as this process can see it.

    It asks the kernel first. The text in the lock file may be wrong: its writer may have ended, or its process id may
    be one of another container.
    """
    status = os.fstat(locked_fd)
    names: list[str] = []
    with suppress(OSError):  # a jail may have no /proc
        names = os.listdir("/proc")
    pids = [int(name) for name in names if name.isdecimal() and _holds(name, status)]
    if os.getpid() in pids:
        return "another tier of this process"
    if pids:
        return " and ".join(f"process {pid} ({_name(pid)})" for pid in pids)
    text = ""
    with suppress(OSError):  # a directory
        text = os.pread(lock_fd, _TEXT_BYTES_MAX, 0).decode("ascii", "replace").strip()
    said = f"; its owner wrote 'process {text}' into {LOCK_NAME}" if text.isprintable() and text else ""
    return f"a process that this one cannot see, of another user, in another container or on another host{said}"


def _holds(pid: str, status: os.stat_result) -> bool:
    """Return whether a process has the lock of a file. False if this process may not see that."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"{folder}/{name}"), status):
                    with open(f"/proc/{pid}/fdinfo/{name}") as file:  # has a line for each lock of this open file
                        if "FLOCK" in file.read():
                            return True
    return False


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "ended"
