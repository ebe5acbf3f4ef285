"""The way down to the blocks: from a namespace's directory to an epoch's to a shard's, a directory at a time.

Each is opened relative to the one before, and none through a symbolic link, so nobody who can write there leads
somebody elsewhere, and what is put in a directory's place meanwhile does not matter.

Where the directory has to be private, each of them has to be this process's user's, and nobody else may write to it.
The namespace's is looked at each time: it can be removed, and made again by others. What is in one that is ours alone
was made by us, unless it had been made before it became so. So epochs and shards are looked at when they are met first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tiered_kv.permissions import check_inner_directory
from tiered_kv_fs.layout import SHARD_HEX
from tiered_kv_fs.posix import DIRECTORY_FLAGS, SAFE_FLAGS, make_directory

_READ_FLAGS: Final = os.O_RDONLY | SAFE_FLAGS


class Descent:
    """Opens the directories of one namespace. Any thread may call, several at once.

    Args:
        namespace_path: The namespace's directory.
        private: Refuse directories that others may have put something into.
    """

    def __init__(self, namespace_path: str, *, private: bool) -> None:
        self._path = namespace_path
        self._is_private = private
        self._sound: tuple[str, set[str]] = ("", set())
        """An epoch that was looked at, and its shards that were; none unless private. Replaced in one step."""

    @contextmanager
    def epoch(self, epoch: str, *, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of an epoch's directory, for calls relative to it.

        Args:
            epoch: Its name.
            make: Make it if it is missing.

        Raises:
            NotPrivateError: Others may have put something into it.
            OSError: It is missing, or no directory, or the file system does not let us.
        """
        namespace_fd = os.open(self._path, DIRECTORY_FLAGS)
        try:
            if self._is_private:
                check_inner_directory(namespace_fd, self._path)
            try:
                epoch_fd = os.open(epoch, DIRECTORY_FLAGS, dir_fd=namespace_fd)
            except FileNotFoundError:
                if not make:
                    raise
                make_directory(epoch, namespace_fd)
                epoch_fd = os.open(epoch, DIRECTORY_FLAGS, dir_fd=namespace_fd)
        finally:
            os.close(namespace_fd)
        try:
            if self._is_private and self._sound[0] != epoch:
                check_inner_directory(epoch_fd, f"{self._path}/{epoch}")
                self._sound = (epoch, set())
            yield epoch_fd
        finally:
            os.close(epoch_fd)

    def open_shard(self, shard: str, epoch: str, epoch_fd: int) -> int:
        """Return a descriptor of a shard's directory, for calls relative to it; the caller closes it.

        Args:
            shard: Its name.
            epoch, epoch_fd: What it is in, and that open.

        Raises:
            NotPrivateError, OSError: As `epoch`.
        """
        shard_fd = os.open(shard, DIRECTORY_FLAGS, dir_fd=epoch_fd)
        if self._is_private and not self._is_sound(shard, epoch):
            try:
                check_inner_directory(shard_fd, f"{self._path}/{epoch}/{shard}")
            except BaseException:
                os.close(shard_fd)
                raise
            sound_epoch, sound_shards = self._sound
            if sound_epoch == epoch:
                sound_shards.add(shard)
        return shard_fd

    def open_block(self, name: str, epoch: str, epoch_fd: int) -> int:
        """Return a descriptor of a block's file, to read it; the caller closes it.

        Args:
            name: The file's.
            epoch, epoch_fd: As `open_shard`.

        Raises:
            NotPrivateError, OSError: As `epoch`.
        """
        shard = name[:SHARD_HEX]
        if self._is_sound(shard, epoch):
            return os.open(f"{shard}/{name}", _READ_FLAGS, dir_fd=epoch_fd)
        shard_fd = self.open_shard(shard, epoch, epoch_fd)
        try:
            return os.open(name, _READ_FLAGS, dir_fd=shard_fd)
        finally:
            os.close(shard_fd)

    def status_of(self, name: str, epoch: str, epoch_fd: int) -> os.stat_result:
        """Return the status of a block's file; arguments and errors as of `open_block`."""
        shard = name[:SHARD_HEX]
        if self._is_sound(shard, epoch):
            return os.stat(f"{shard}/{name}", dir_fd=epoch_fd, follow_symlinks=False)
        shard_fd = self.open_shard(shard, epoch, epoch_fd)
        try:
            return os.stat(name, dir_fd=shard_fd, follow_symlinks=False)
        finally:
            os.close(shard_fd)

    def _is_sound(self, shard: str, epoch: str) -> bool:
        """Return whether a shard's directory was ours alone, in ones that are: then nobody has exchanged it since."""
        sound_epoch, sound_shards = self._sound
        return sound_epoch == epoch and shard in sound_shards
