"""The directory of a tier: who owns it, whose blocks it holds, and what lies in it.

    lock                          held with flock(2) by the owner; holds its process id
    tiered-kv-nvme.json           format version, namespace, block size
    epoch                         see epoch.py
    segment-<digest>-<slot>.kv    see layout.py; <digest> is the start of the namespace's digest

Anything else is foreign: never touched, but counted against the capacity.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import FormatError, TierBusyError, TierUnavailableError
from tiered_kv.permissions import NotPrivateError, check_directory, check_file, open_directory
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS, Disk, write_fully
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.layout import FORMAT_VERSION

LOCK_NAME: Final = "lock"
MARKER_NAME: Final = "tiered-kv-nvme.json"

DIRECTORY_RESERVE_BYTES: Final = 64 << 10
"""Kept free of segments: the small files, and the directory itself and its growth."""
SEGMENT_RESERVE_BYTES: Final = 8 << 10
"""Kept free beside each segment: blocks in which the file system notes the file's extents."""

_NAMESPACE_KEY = "namespace"
_MARKER_TEMPORARY = MARKER_NAME + ".tmp"
LEFTOVERS = (_MARKER_TEMPORARY, "probe.tmp")
_OURS = frozenset((LOCK_NAME, MARKER_NAME, EPOCH_NAME, *LEFTOVERS))
_LOST_AND_FOUND: Final = "lost+found"
_TOLERATED = _OURS | {_LOST_AND_FOUND}
_MARKER_BYTES_MAX = 1 << 20
_REMEDIES = {
    errno.ENOSPC: "; free some space on its disk, or give a directory on another",
    errno.EDQUOT: "; free some of your quota on its disk, or give a directory on another",
    errno.EACCES: "; make it writable for this user, or give another",
    errno.EPERM: "; make it writable for this user, or give another",
    errno.EROFS: "; give one on a file system that can be written to",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose blocks a directory holds.

    Args:
        digest: The namespace's digest, 16 bytes.
        namespace: The namespace in readable form.
        block_bytes: Size of a block.
    """

    digest: bytes
    namespace: Mapping[str, object]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in a directory.

    Args:
        segments: Slot of each segment file.
        used_bytes: What all of it occupies on the device, the directory itself included.
        claimed_bytes: What it may come to occupy without another file being made: holes filled, reserves used.
        foreign_files: How many entries are not this tier's.
    """

    segments: tuple[int, ...]
    used_bytes: int
    claimed_bytes: int
    foreign_files: int


class Directory:
    """An owned directory. It is made if it is missing, claimed if it is empty, and refused if it is someone else's.

    Args:
        path: Where it is.
        identity: Whose blocks it shall hold.
        tier: The tier's name, for messages.

    Raises:
        ConfigError: It is a symbolic link, another user's, or open to others; see `tiered_kv.permissions`.
        TierBusyError: Another process owns it.
        FormatError: It is of another format version or namespace, or holds files and is not this tier's at all.
        TierUnavailableError: The file system does not let us.
    """

    def __init__(self, path: str, identity: Identity, *, tier: str = "") -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.identity = identity
        self.foreign_files = 0
        """How many entries were not this tier's when they were last listed."""
        self._tier = tier
        self._pattern = re.compile(rf"segment-{identity.digest[:4].hex()}-(\d{{6}})\.kv")
        try:
            with ExitStack() as undo:
                self.fd = open_directory(self.path)
                undo.callback(os.close, self.fd)
                self._refuse_foreign()
                check_directory(self.fd, self.path, may_tighten=not set(os.listdir(self.fd)) - {_LOST_AND_FOUND})
                self._lock_fd = take_lock(self.fd, self.path, tier)
                undo.callback(_give_back, self._lock_fd)
                self._remove_leftovers()
                self._check_marker()
                undo.pop_all()
        except OSError as error:
            raise TierUnavailableError(self._why_unusable(error), tier=tier, operation="open") from error

    def segment_name(self, slot: int) -> str:
        """Return the file name of the segment in `slot`."""
        return f"segment-{self.identity.digest[:4].hex()}-{slot:06d}.kv"

    def list(self) -> Listing:
        """Return what lies here now. Any thread may call.

        Raises:
            OSError: It cannot be known.
        """
        segments: list[int] = []
        own_bytes = os.fstat(self.fd).st_blocks * 512
        segment_bytes = claimed_bytes = foreign_bytes = foreign_files = 0
        # A descriptor of its own: two listings at once would share the position of `self.fd`.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    size_bytes, occupied_bytes = _sizes(entry, fd)
                    match = self._pattern.fullmatch(entry.name)
                    if match:
                        segments.append(int(match[1]))
                        segment_bytes += occupied_bytes
                        claimed_bytes += max(size_bytes + SEGMENT_RESERVE_BYTES, occupied_bytes)
                    elif entry.name in _OURS:
                        own_bytes += occupied_bytes
                    else:
                        foreign_files += 1
                        foreign_bytes += occupied_bytes
        finally:
            os.close(fd)
        self.foreign_files = foreign_files
        claimed_bytes += foreign_bytes + max(own_bytes, DIRECTORY_RESERVE_BYTES)
        used_bytes = segment_bytes + foreign_bytes + own_bytes
        return Listing(tuple(sorted(segments)), used_bytes, claimed_bytes, foreign_files)

    def close(self) -> None:
        """Give the directory up."""
        _give_back(self._lock_fd)
        os.close(self.fd)

    def _refuse_foreign(self) -> None:
        """Refuse a directory that holds files and no marker, before anything is written into it."""
        names = set(os.listdir(self.fd))
        strangers = sorted(names - _TOLERATED)
        if MARKER_NAME not in names and strangers:
            raise FormatError(
                f"{self.path} is not empty and not a directory of this tier (it holds {strangers[0]!r}); "
                "give an empty or a new directory",
                tier=self._tier,
                operation="open",
            )

    def _remove_leftovers(self) -> None:
        """Remove what a crash while opening may have left."""
        for name in LEFTOVERS:
            try:
                os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                pass

    def _check_marker(self) -> None:
        try:
            marker = read_marker(self.fd, self.path)
        except FileNotFoundError:
            self._refuse_foreign()  # it may have been filled while we had no lock
            self._write_marker()
            return
        except ValueError as error:
            raise self._format_error(str(error)) from error
        namespace, digest, block_bytes = dict(marker.namespace), marker.digest, marker.block_bytes
        if digest != self.identity.digest.hex() or block_bytes != self.identity.block_bytes:
            raise self._format_error(self._difference(namespace, digest, block_bytes))

    def _difference(self, namespace: dict[str, object], digest: object, block_bytes: object) -> str:
        wanted = json.loads(json.dumps(dict(self.identity.namespace), default=str))
        found: dict[str, object] = {**namespace, "block_bytes": block_bytes}
        wanted["block_bytes"] = self.identity.block_bytes
        fields = list(_differences(found, wanted))
        detail = "; ".join(fields) or f"digest {digest} there, {self.identity.digest.hex()} here"
        return f"{self.path} holds blocks of another namespace ({detail}); give each namespace its own directory"

    def _write_marker(self) -> None:
        marker = {
            "format": FORMAT_VERSION,
            "namespace_digest": self.identity.digest.hex(),
            "block_bytes": self.identity.block_bytes,
            "namespace": dict(self.identity.namespace),
        }
        text = json.dumps(marker, indent=2, sort_keys=True, default=str) + "\n"
        fd = os.open(_MARKER_TEMPORARY, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, FILE_MODE, dir_fd=self.fd)
        try:
            write_fully(Disk(), fd, [memoryview(text.encode())], 0)  # a marker that is cut off shuts us out for good
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(_MARKER_TEMPORARY, MARKER_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    def _why_unusable(self, error: OSError) -> str:
        if isinstance(error, NotPrivateError):
            return str(error.strerror)
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            return f"{self.path} is a file; give a directory"
        return f"the directory {self.path} cannot be used: {reason_and_remedy(error)}"

    def _format_error(self, message: str) -> FormatError:
        return FormatError(message, tier=self._tier, operation="open")


@dataclass(frozen=True, slots=True)
class Marker:
    """What a directory says of itself.

    Args:
        digest: The namespace's digest, in hex.
        namespace: The namespace in readable form.
        block_bytes: Size of a block.
    """

    digest: object
    namespace: Mapping[str, object]
    block_bytes: object


def read_marker(directory_fd: int, path: str) -> Marker:
    """Return a directory's marker.

    Args:
        directory_fd: The directory, open.
        path: The same, for messages.

    Raises:
        FileNotFoundError: It has none.
        NotPrivateError, OSError: It is none of ours, or cannot be read.
        ValueError: It is damaged, or of another format version.
    """
    fd = os.open(MARKER_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory_fd)
    try:
        check_file(fd, f"{path}/{MARKER_NAME}")
        text = os.pread(fd, _MARKER_BYTES_MAX, 0)
    finally:
        os.close(fd)
    try:
        fields = json.loads(text)
        version = fields["format"]
        if version == FORMAT_VERSION:  # what else there is depends on it
            return Marker(fields["namespace_digest"], dict(fields["namespace"]), fields["block_bytes"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}/{MARKER_NAME} cannot be read; if the blocks may go, delete the directory") from error
    shown = version if isinstance(version, int) else "unknown"
    raise ValueError(
        f"{path} has format version {shown}, and this release reads version {FORMAT_VERSION}; "
        "use the release that wrote it, give another directory, or delete this one"
    )


def take_lock(directory_fd: int, path: str, tier: str) -> int:
    """Become the owner of a directory; return the descriptor that holds its lock until it is closed.

    Args:
        directory_fd: The directory, open.
        path, tier: For messages.

    Raises:
        TierBusyError: Another process, or another tier of this one, owns it.
        OSError: The file system does not let us.
    """
    fd = os.open(LOCK_NAME, OPEN_FLAGS | os.O_NONBLOCK | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
    try:
        check_file(fd, f"{path}/{LOCK_NAME}")  # before anything is written to it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException as error:
        try:
            if isinstance(error, BlockingIOError):
                raise _busy(fd, path, tier) from error
            raise
        finally:
            os.close(fd)  # a descriptor that is forgotten here would hold the lock for ever
    return fd


def _busy(lock_fd: int, path: str, tier: str) -> TierBusyError:
    owner = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
    if owner == str(os.getpid()):
        message = (
            f"{path} is in use by another tier of this process, or by process {owner} of another "
            "container; give each tier its own directory"
        )
    else:
        message = f"{path} is in use by process {owner}; stop it, or give this stack its own directory"
    return TierBusyError(message, tier=tier, operation="open")


def reason_and_remedy(error: OSError) -> str:
    """Return what the system says of a directory that cannot be used, and what to do."""
    return f"{error.strerror}{_REMEDIES.get(error.errno or 0, '')}"


def _give_back(lock_fd: int) -> None:
    """Unlock and close; closing alone would leave the lock with a child that was forked meanwhile."""
    with suppress(OSError):
        fcntl.flock(lock_fd, fcntl.LOCK_UN)
    os.close(lock_fd)


def _differences(there: Mapping[str, object], here: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield what differs between two nested mappings, a line for each innermost key."""
    for name in sorted(there.keys() | here.keys()):
        old, new = there.get(name), here.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            # What everything stands in would only repeat itself.
            yield from _differences(old, new, "" if name == _NAMESPACE_KEY else f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {old!r} there, {new!r} here"


def _sizes(entry: os.DirEntry[str], directory_fd: int) -> tuple[int, int]:
    """Return the size of an entry and what it occupies, a directory with all that is in it; 0 for what has vanished.

    Raises:
        OSError: It is there, and its size cannot be known: it must not be taken for nothing.
    """
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0, 0
    occupied_bytes = status.st_blocks * 512
    if entry.is_dir(follow_symlinks=False):
        inside_bytes = 0
        try:
            for _, _, names, fd in os.fwalk(entry.name, dir_fd=directory_fd):
                inside_bytes += os.fstat(fd).st_blocks * 512 + sum(_occupied_bytes(name, fd) for name in names)
        except (FileNotFoundError, PermissionError):
            pass  # it has vanished, or is not ours to look into: what was seen of it counts
        occupied_bytes = max(occupied_bytes, inside_bytes)
    return status.st_size, occupied_bytes


def _occupied_bytes(name: str, directory_fd: int) -> int:
    """Return what a file occupies; 0 if it has vanished, or is not ours to look at."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_blocks * 512
    except (FileNotFoundError, PermissionError):
        return 0
