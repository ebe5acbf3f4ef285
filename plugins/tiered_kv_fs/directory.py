"""The shared directory, opened for one namespace."""

from __future__ import annotations

import os
from dataclasses import replace

from tiered_kv.permissions import check_directory, open_directory
from tiered_kv.toolkit.claimed import ClaimedDirectory, Identity, absolute, refuse_other_device
from tiered_kv.toolkit.small_files import SMALL_FILE_BYTES_MAX, as_text, fields_of, read_file, replace_file
from tiered_kv_fs.files import make_directory
from tiered_kv_fs.layout import FORMAT_VERSION, LEDGER_NAME, LOCK_NAME, MARKER_NAME, NAMESPACE_NAME, SWEEP_NAME


def claimed(path: str, tier: str, *, private: bool) -> ClaimedDirectory:
    return ClaimedDirectory(absolute(path), MARKER_NAME, FORMAT_VERSION, frozenset(), tier, private)


class Directory:
    """The directory. A missing one is made.

    Any thread may call, except the scheduler's: all calls may wait for the file system.

    Raises:
        ConfigError: It is a symbolic link, or should be private and is another user's or open to others.
        FormatError: It has another format version, or holds foreign files and no marker.
        TierUnavailableError: The file system refuses.
    """

    def __init__(self, path: str, identity: Identity, *, tier: str = "", private: bool = True) -> None:
        self.claimed = claimed(path, tier, private=private)
        self._identity = identity
        self._place: tuple[int, int] | None = None  # device and inode of the directory
        self.path = self.claimed.path
        self.namespace = identity.digest.hex()
        self.namespace_path = f"{self.path}/{self.namespace}"
        try:
            self.make()
        except OSError as error:
            raise self.claimed.unavailable(error) from error

    def make(self) -> None:
        """Check the directory, and make missing files in it.

        Raises:
            ConfigError, FormatError: As the constructor.
            OSError: The file system refuses, or another one is mounted there now.
        """
        if self._place is not None:
            refuse_other_device(self.path, self._place[0])
        fd = open_directory(self.path)
        try:
            status = os.fstat(fd)
            place = status.st_dev, status.st_ino
            claimed = self.claimed
            # What is in the same directory was accepted at the opening: only the marker is missing.
            if self._place == place and os.path.isdir(self.namespace_path):
                claimed = replace(claimed, own_names=frozenset(os.listdir(fd)))
            claimed.check(fd)
            claimed.mark(fd, {"tier": "fs"})
        finally:
            os.close(fd)
        self._place = place
        # If the directory is removed while it is open, a keeper may make these anew before the marker.
        self.claimed = replace(self.claimed, own_names=frozenset({LOCK_NAME, LEDGER_NAME, SWEEP_NAME}))
        self._make_namespace()

    def is_marked(self) -> bool:
        """Return whether the marker and the readable form are there: cleaners and purges delete them."""
        return all(map(os.path.lexists, (f"{self.path}/{MARKER_NAME}", f"{self.namespace_path}/{NAMESPACE_NAME}")))

    def _make_namespace(self) -> None:
        make_directory(self.namespace_path)
        if os.path.islink(self.namespace_path):
            raise self.claimed.format_error(f"{self.namespace_path} is a symbolic link; remove it")
        if self.claimed.private:
            fd = open_directory(self.namespace_path, make=False)
            try:
                check_directory(fd, self.namespace_path, os.listdir(fd))
            finally:
                os.close(fd)
        path = f"{self.namespace_path}/{NAMESPACE_NAME}"
        found = fields_of(read_file(path, SMALL_FILE_BYTES_MAX)).get("block_bytes")
        if found is None:
            replace_file(path, as_text(self._identity.fields()))
        elif found != self._identity.block_bytes:
            raise self.claimed.format_error(
                f"{self.namespace_path} holds blocks of {found} bytes, and these have {self._identity.block_bytes}; "
                "give blocks of another size another namespace or another directory"
            )
