"""A shared directory, opened for one namespace."""

from __future__ import annotations

import errno
import os

from tiered_kv.errors import TierUnavailableError
from tiered_kv.permissions import check_inner_directory, open_directory
from tiered_kv.toolkit.claimed import ClaimedDirectory, Identity, absolute
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX
from tiered_kv.toolkit.small_files import SMALL_FILE_BYTES_MAX, as_text, fields_of, read_file, replace_file
from tiered_kv_fs.files import make_directory
from tiered_kv_fs.layout import (
    EPOCH_NAME,
    FORMAT_VERSION,
    LEDGER_NAME,
    LOCK_NAME,
    MARKER_NAME,
    NAMESPACE_NAME,
    SWEEP_NAME,
)


def claimed(path: str, tier: str, *, private: bool) -> ClaimedDirectory:
    """Return the directory at `path` as this type of tier claims it."""
    own_names = frozenset({LOCK_NAME, LEDGER_NAME, SWEEP_NAME})
    return ClaimedDirectory(absolute(path), MARKER_NAME, FORMAT_VERSION, own_names, tier, private)


class Directory:
    """The directory, opened by one tier. It is made if it is missing, and refused if it is another owner's.

    Any thread may call, except the scheduler's: all calls may wait for the file system.

    Args:
        path: Its path.
        identity: The identity of the tier's blocks.
        tier: The tier's name, for messages.
        private: Refuse a directory that other users can access; see `tiered_kv.permissions`.

    Raises:
        ConfigError: It is a symbolic link, another user's, or open to others.
        FormatError: It is of another format version, or holds files and is not this tier's at all.
        TierUnavailableError: The file system refuses.
    """

    def __init__(self, path: str, identity: Identity, *, tier: str = "", private: bool = True) -> None:
        self._claimed = claimed(path, tier, private=private)
        self._identity = identity
        self._device: int | None = None
        self.path = self._claimed.path
        self.namespace = identity.digest.hex()
        self.namespace_path = f"{self.path}/{self.namespace}"
        self.lock_path = f"{self.path}/{LOCK_NAME}"
        self.ledger_path = f"{self.path}/{LEDGER_NAME}"
        self.sweep_path = f"{self.path}/{SWEEP_NAME}"
        try:
            os.close(open_directory(self.path))  # with the directories above it
            self.make()
        except OSError as error:
            raise self.unavailable(error) from error

    def make(self) -> None:
        """Check the directory, and make missing files in it.

        Raises:
            ConfigError, FormatError: As the constructor.
            OSError: The file system refuses, or another file system is mounted there now.
        """
        make_directory(self.path)
        fd = open_directory(self.path, make=False)
        try:
            device = os.fstat(fd).st_dev
            if self._device not in (None, device):
                raise OSError(errno.ENODEV, "another file system is mounted there now", self.path)
            self._claimed.check(fd)
            self._claimed.mark(fd, {"tier": "fs"})
        finally:
            os.close(fd)
        self._device = device
        self._make_namespace()

    def unavailable(self, error: OSError) -> TierUnavailableError:
        """Return the error for a directory that cannot be opened."""
        return self._claimed.unavailable(error)

    def _make_namespace(self) -> None:
        """Make the namespace's directory, and write the namespace's readable form beside the blocks."""
        make_directory(self.namespace_path)
        if os.path.islink(self.namespace_path):
            raise self._claimed.format_error(f"{self.namespace_path} is a symbolic link; remove it")
        if self._claimed.private:
            fd = open_directory(self.namespace_path, make=False)
            try:
                check_inner_directory(fd, self.namespace_path)
            finally:
                os.close(fd)
        path = f"{self.namespace_path}/{NAMESPACE_NAME}"
        found = fields_of(read_file(path, SMALL_FILE_BYTES_MAX)).get("block_bytes")
        if found is None:
            replace_file(path, as_text(self._identity.fields()))
        elif found != self._identity.block_bytes:
            raise self._claimed.format_error(
                f"{self.namespace_path} holds blocks of {found} bytes, and these have {self._identity.block_bytes}; "
                "give blocks of another size another namespace or another directory"
            )


class EpochFile:
    """Keeps the mark of the namespace's epoch in the directory; a file store for `tiered_kv.toolkit.epoch`.

    A file system that hangs delays its caller beyond the deadline: such a call cannot be ended.

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
