"""A shared directory, opened for one namespace: whose it is, who can get at it, and its small files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.permissions import NotPrivateError, check_directory, check_file, check_inner_directory, open_directory
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX
from tiered_kv_fs.files import make_directory, opened, read_file, replace_file
from tiered_kv_fs.layout import (
    EPOCH_NAME,
    FORMAT_VERSION,
    LEDGER_NAME,
    LOCK_NAME,
    MARKER_NAME,
    NAMESPACE_NAME,
    SWEEP_NAME,
    TEMPORARY,
)

_SMALL_FILE_BYTES_MAX: Final = 1 << 20
_LOST_AND_FOUND: Final = "lost+found"
"""Made by mkfs(8), and root's, whoever's the file system is."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose blocks a tier stores.

    Args:
        digest: The namespace's digest, 16 bytes.
        namespace: The namespace in readable form.
        block_bytes: Size of a block.
    """

    digest: bytes
    namespace: Mapping[str, object]
    block_bytes: int


class Directory:
    """The directory as one tier has it open. It is made if it is missing, and refused if it is someone else's.

    Any thread may call, except the scheduler's: all calls may wait for the file system.

    Args:
        path: Where it is.
        identity: Whose blocks the tier stores.
        tier: The tier's name, for messages.
        private: Refuse a directory that others can get at; see `tiered_kv.permissions`.

    Raises:
        ConfigError: It is a symbolic link, another user's, or open to others.
        FormatError: It is of another format version, or holds files and is not this tier's at all.
        TierUnavailableError: The file system does not let us.
    """

    def __init__(self, path: str, identity: Identity, *, tier: str = "", private: bool = True) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.namespace = identity.digest.hex()
        self.namespace_path = f"{self.path}/{self.namespace}"
        self.lock_path = f"{self.path}/{LOCK_NAME}"
        self.ledger_path = f"{self.path}/{LEDGER_NAME}"
        self.sweep_path = f"{self.path}/{SWEEP_NAME}"
        self._identity = identity
        self._tier = tier
        self._is_private = private
        self._device: int | None = None
        try:
            fd = open_directory(self.path)  # with the directories above it
            os.close(fd)
            self.make()
        except OSError as error:
            raise self.unavailable(error) from error

    def make(self) -> None:
        """Check the directory, and make what is missing in it.

        Raises:
            ConfigError, FormatError: As the constructor.
            OSError: The file system does not let us, or another file system is mounted there now.
        """
        make_directory(self.path)
        fd = open_directory(self.path, make=False)
        try:
            device = os.fstat(fd).st_dev
            if self._device not in (None, device):
                raise OSError(errno.ENODEV, "another file system is mounted there now", self.path)
            names = set(os.listdir(fd)) - {_LOST_AND_FOUND}
            self._check_names(names)
            if self._is_private:
                check_directory(fd, self.path, may_tighten=not names)
        finally:
            os.close(fd)
        self._device = device
        self._check_marker()
        self._make_namespace()

    def unavailable(self, error: OSError) -> TierUnavailableError:
        """Return what to raise where the directory cannot be opened."""
        detail = "it has no working flock(2)" if error.errno in (errno.ENOLCK, errno.ENOTSUP) else str(error)
        if isinstance(error, NotPrivateError):
            detail = str(error.strerror)
        return TierUnavailableError(
            f"the directory {self.path} cannot be used: {detail}", tier=self._tier, operation="open"
        )

    def _check_names(self, names: set[str]) -> None:
        """Refuse a directory that holds files and no marker, before anything is written into it."""
        if MARKER_NAME in names:
            return
        if self._device is not None:  # removed while it was open, and the keepers made theirs anew
            names -= {LOCK_NAME, LEDGER_NAME, SWEEP_NAME}
        for name in sorted(names):
            if not TEMPORARY.fullmatch(name):  # of the marker, by a process that is at it or was killed
                raise self._format_error(
                    f"{self.path} is not empty and not a directory of this tier (it holds {name!r}); "
                    "give an empty or a new directory"
                )

    def _check_marker(self) -> None:
        path = f"{self.path}/{MARKER_NAME}"
        if self._is_private:
            with suppress(FileNotFoundError), opened(path, os.O_RDONLY) as fd:
                check_file(fd, path)
        if read_version(self.path, self._tier) is None:
            # Flushed: a directory with an empty marker, which a power failure may leave, is nobody's any more.
            replace_file(path, _as_text({"format": FORMAT_VERSION, "tier": "fs"}), flush=True)

    def _make_namespace(self) -> None:
        """Make the namespace's directory, and note beside the blocks whose they are."""
        make_directory(self.namespace_path)
        if os.path.islink(self.namespace_path):
            raise self._format_error(f"{self.namespace_path} is a symbolic link; remove it")
        if self._is_private:
            fd = open_directory(self.namespace_path, make=False)
            try:
                check_inner_directory(fd, self.namespace_path)
            finally:
                os.close(fd)
        path = f"{self.namespace_path}/{NAMESPACE_NAME}"
        found = fields_of(read_file(path, _SMALL_FILE_BYTES_MAX) or b"").get("block_bytes")
        if found is None:
            described = {
                "block_bytes": self._identity.block_bytes,
                "namespace_digest": self.namespace,
                "namespace": dict(self._identity.namespace),
            }
            replace_file(path, _as_text(described))
        elif found != self._identity.block_bytes:
            raise self._format_error(
                f"{self.namespace_path} holds blocks of {found} bytes, and these have {self._identity.block_bytes}; "
                "give blocks of another size another namespace or another directory"
            )

    def _format_error(self, message: str) -> FormatError:
        return FormatError(message, tier=self._tier, operation="open")


class EpochFile:
    """Where a directory keeps the mark of its namespace's epoch; a file store for `tiered_kv.toolkit.epoch`.

    A file system that hangs holds up its caller beyond the deadline: nothing ends such a call.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._path = f"{directory.namespace_path}/{EPOCH_NAME}"

    def read(self, deadline: float) -> bytes | None:
        data = read_file(self._path, MARK_BYTES_MAX)
        return b"" if data is None and os.path.lexists(self._path) else data

    def create(self, data: bytes, deadline: float) -> None:
        self._directory.make()
        replace_file(self._path, data, only_new=True)

    def write(self, data: bytes, deadline: float) -> None:
        self._directory.make()
        replace_file(self._path, data)


def read_version(path: str, tier: str) -> int | None:
    """Return the format version of the directory at `path`, None if it has no marker.

    Raises:
        FormatError: It is not this release's, or cannot be read.
    """
    marker = f"{path}/{MARKER_NAME}"
    text = read_file(marker, _SMALL_FILE_BYTES_MAX)
    if text is None and not os.path.lexists(marker):
        return None
    version = fields_of(text or b"").get("format")
    if version == FORMAT_VERSION:
        return FORMAT_VERSION
    if version is None:
        message = f"{marker} cannot be read; if the blocks may go, delete the directory"
    else:
        shown = version if isinstance(version, int) else "unknown"
        message = (
            f"{path} has format version {shown}, and this release reads version {FORMAT_VERSION}; "
            "use the release that wrote it, give another directory, or delete this one"
        )
    raise FormatError(message, tier=tier, operation="open")


def fields_of(text: bytes) -> dict[str, object]:
    """Return the fields of a small file, none if it cannot be read."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _as_text(fields: Mapping[str, object]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n").encode()
