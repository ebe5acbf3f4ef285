"""A claimed directory: a marker file in it says which type of tier keeps its blocks there.

A tier calls it while it opens, and later to replace deleted files. Any thread but the scheduler's may call: each call
may wait for the file system. A directory that is not this tier's is refused, and no byte in it changes.

A tier opens its directory in these steps. A tier with a lock takes the lock between steps 2 and 3.

1. `make`: open the directory, which must not be a symbolic link. Make a missing one, unless its mount is missing.
2. `check`: refuse a directory with foreign files and no marker, or one that another user controls.
3. `mark`: read the marker, and refuse another format version. Without a marker, write one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from pydantic import Field, model_validator

from tiered_kv.config.units import FilePath, expanded_path
from tiered_kv.errors import ConfigError, FormatError, TierUnavailableError, remedy_of
from tiered_kv.system.file_systems import mount_of
from tiered_kv.system.permissions import NotPrivateError, check_directory, check_file, open_directory
from tiered_kv.toolkit.codecs import CodecSettings
from tiered_kv.toolkit.small_files import SMALL_FILE_BYTES_MAX, as_text, fields_of, names_in, opened, replace_file

TEMPORARY: Final = re.compile(r"\.[a-z.-]+\.[0-9a-f]{16}\.tmp")
"""A small file while it is written; see `small_files.replace_file`."""
LOST_AND_FOUND: Final = "lost+found"  # made by mkfs(8), always owned by root
_REMEDIES: Final = {
    errno.ENOSPC: "; free some space on its disk, or give a directory on another",
    errno.EDQUOT: "; free some of your quota on its disk, or give a directory on another",
    errno.EACCES: "; make it writable for this user, or give another",
    errno.EPERM: "; make it writable for this user, or give another",
    errno.ENOENT: "; give a path where a directory can be made",
    errno.EEXIST: ", and is no directory; give another path",
    errno.ENOTDIR: "; give another path",
    errno.ESTALE: "; mount its file system again",
    errno.EROFS: "; give one on a file system that can be written to",
    errno.ENOLCK: ": it has no working flock(2)",
    errno.ENOTSUP: ": it has no working flock(2)",
    errno.ESPIPE: ": its files are only written front to back; mount it with a cache of writes, or give another",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Describes the blocks that a directory holds."""

    digest: bytes
    """The digest of the namespace, of 16 bytes."""
    namespace: Mapping[str, object]  # the readable form of the namespace
    block_bytes: int

    def fields(self) -> dict[str, object]:
        return {
            "block_bytes": self.block_bytes,
            "namespace_digest": self.digest.hex(),
            "namespace": dict(self.namespace),
        }


class DirectorySettings(CodecSettings):
    """The base of the settings of a tier that keeps blocks in a directory."""

    path: FilePath
    required_mount: FilePath | None = Field(
        default=None,
        description="A mount point at or above `path`. While nothing is mounted there, the tier does not open. "
        "Otherwise it makes the directory on the disk below.",
    )

    @model_validator(mode="after")
    def _is_below(self) -> Self:
        if self.required_mount is not None:
            path, point = absolute(self.path), absolute(self.required_mount)
            if os.path.commonpath((path, point)) != point:
                raise ValueError(f"expected a required_mount at or above path, {path}, found {point}")
        return self


class Made(NamedTuple):
    """An open directory."""

    fd: int
    missing: str  # the topmost directory that had to be made; empty if none had to


@dataclass(frozen=True, slots=True)
class ClaimedDirectory:
    """A directory of one type of tier."""

    path: str  # absolute; see `absolute`
    marker_name: str
    format_version: int  # the version of markers that this release reads and writes
    own_names: Set[str]  # files that the tier may make before the marker
    tier: str = ""  # the tier's name, for messages
    private: bool = True  # whether to refuse a directory that another user controls; see `tiered_kv.system.permissions`
    required_mount: str = ""  # a mount point at or above `path`, without which the directory is neither made nor opened

    def make(self) -> Made:
        """Open the directory; make it if it is missing, with those above it.

        Raises:
            ConfigError: It is a symbolic link.
            TierUnavailableError: Nothing is mounted at `required_mount`.
            OSError: The file system refuses.
        """
        if self.required_mount:
            self._require_mount()
        parts = (*reversed(Path(self.path).parents), Path(self.path))
        missing = [str(each) for each in parts if not os.path.lexists(each)]
        return Made(open_directory(self.path), missing[0] if missing else "")

    def describe(self, fd: int, made: str) -> dict[str, object]:
        """Describe where the open directory is; `made` is the topmost directory that was made for it."""
        mount = mount_of(fd)
        return {
            "path": self.path,
            **({"file_system": str(mount)} if mount is not None else {}),
            **({"made": f"{made} was missing, and is made now"} if made else {}),
        }

    def _require_mount(self) -> None:
        found = "there is no such directory"
        with suppress(FileNotFoundError):
            with opened(self.required_mount, os.O_RDONLY | os.O_DIRECTORY) as fd:
                mount = mount_of(fd)
            if mount is None:
                is_mounted = os.path.ismount(self.required_mount)
            else:
                is_mounted = mount.point == os.path.realpath(self.required_mount)
            if is_mounted:
                return
            found = f"it is a directory of {mount or 'another file system'}"
        message = f"required_mount: nothing is mounted at {self.required_mount}: {found}; mount its file system"
        raise TierUnavailableError(message, tier=self.tier, operation="open")

    def check(self, fd: int) -> None:
        """Refuse a directory that is not this tier's, or that another user controls; see `check_directory`.

        Raises:
            ConfigError: Another user owns it, or can write to it.
            FormatError: It holds foreign files and no marker.
            OSError: The file system refuses.
        """
        names = self._refuse_foreign(fd)
        if self.private:
            check_directory(fd, self.path, names)

    def mark(self, fd: int, fields: Mapping[str, object]) -> Mapping[str, object] | None:
        """Return the marker's fields; without a marker, write one and return None. Raises: see `marker`."""
        found = self.marker(fd)
        if found is None:
            # Flushed: else a power failure may leave an empty marker, which makes the directory unusable.
            marker = {"format": self.format_version, **fields}
            replace_file(self.marker_name, as_text(marker), dir_fd=fd, flush=True)
        return found

    def marker(self, fd: int) -> Mapping[str, object] | None:
        """Return the marker's fields; None if there is no marker and no foreign file.

        Raises:
            FormatError: It is damaged, of another format version, or missing beside foreign files.
            NotPrivateError: Another user may have written it.
            OSError: It cannot be read.
        """
        path = f"{self.path}/{self.marker_name}"
        try:
            with opened(self.marker_name, os.O_RDONLY, dir_fd=fd) as marker_fd:
                check_file(marker_fd, path, any_owner=not self.private)
                fields = fields_of(os.pread(marker_fd, SMALL_FILE_BYTES_MAX, 0))
        except FileNotFoundError:
            self._refuse_foreign(fd)
            return None
        version = fields.get("format")
        if version == self.format_version:
            return fields
        if version is None:
            raise self.format_error(f"{path} cannot be read; if the blocks may go, delete the directory")
        raise self.format_error(
            f"{self.path} has format version {version if isinstance(version, int) else 'unknown'}, "
            f"and this release reads version {self.format_version}; "
            "use the release that wrote it, give another directory, or delete this one"
        )

    @contextmanager
    def opened(self, operation: str) -> Iterator[int | None]:
        """Yield a descriptor of the directory, None if it is missing. Errors name the `operation`.

        Raises:
            ConfigError: It is a symbolic link.
            TierUnavailableError: The file system refuses, here or in the `with` block.
        """
        fd = None
        try:
            with suppress(FileNotFoundError):
                fd = open_directory(self.path, make=False)
            try:
                yield fd
            finally:
                if fd is not None:
                    os.close(fd)
        except OSError as error:
            raise self.unavailable(error, operation) from error

    def unavailable(self, error: OSError, operation: str = "open") -> TierUnavailableError:
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            return TierUnavailableError(f"{self.path} is a file; give a directory", tier=self.tier, operation=operation)
        remedy = _REMEDIES.get(error.errno or 0, remedy_of(error))
        if isinstance(error, NotPrivateError):
            remedy = "; or set `private: false`" if error.errno == errno.EPERM else ""
        has_name = isinstance(error.filename, str) and error.filename != self.path  # else it is a descriptor's number
        name = f" ({error.filename})" if has_name else ""
        message = f"the directory {self.path} cannot be used: {error.strerror or error}{name}{remedy}"
        return TierUnavailableError(message, tier=self.tier, operation=operation)

    def format_error(self, message: str) -> FormatError:
        return FormatError(message, tier=self.tier, operation="open")

    def _refuse_foreign(self, fd: int) -> set[str]:
        """Return the names in the directory; refuse foreign files without a marker."""
        names = set(names_in(fd)) - {LOST_AND_FOUND}
        if self.marker_name in names:
            return names
        ours = {name for name in names if name in self.own_names or TEMPORARY.fullmatch(name)}
        if foreign := sorted(names - {name for name in ours if not self.private or _is_own(name, fd)}):
            raise self.format_error(
                f"{self.path} is not empty and not a directory of this tier (it holds {foreign[0]!r}); "
                "give an empty or a new directory"
            )
        return names


def _is_own(name: str, directory_fd: int) -> bool:
    """Return whether this user owns an entry, or it has vanished."""
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def walk(root: str) -> Iterator[list[tuple[str, os.stat_result]]]:
    """Yield the entries of each directory below `root`: their paths relative to `root`, and their status.

    Symbolic links are not followed. Entries that vanish meanwhile are left out, and so are directories of other users
    that this process may not read.
    """
    waiting = [""]
    while waiting:
        above = waiting.pop()
        found: list[tuple[str, os.stat_result]] = []
        try:
            with os.scandir(f"{root}/{above}") as entries:
                for entry in entries:
                    path = f"{above}/{entry.name}" if above else entry.name
                    with suppress(FileNotFoundError):
                        found.append((path, entry.stat(follow_symlinks=False)))
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except PermissionError:
            if os.lstat(f"{root}/{above}").st_uid == os.geteuid():
                raise  # it may hold this user's blocks
        yield found


def as_line(description: Mapping[str, object]) -> str:
    """Return a description on one line, for the log."""
    return ", ".join(f"{name}: {value}" for name, value in description.items())


def absolute(path: str) -> str:
    try:
        return os.path.abspath(expanded_path(path))
    except ValueError as error:
        raise ConfigError(f"{error}, found {path}", location="path") from None


def refuse_other_device(path: str, device: int) -> None:
    """Raise `OSError` if `path` is no longer on `device`. Call it before making directories: the mount may be gone."""
    above = path
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if os.stat(above).st_dev != device:
        raise OSError(errno.ENODEV, "another file system is mounted there now", path)
