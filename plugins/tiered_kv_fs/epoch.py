"""The file that keeps a namespace's epoch mark. The rules are in `tiered_kv.toolkit.epoch`.

`Epoch` calls it on threads that may wait. A write replaces the whole file: readers find the old mark or the new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tiered_kv.toolkit.epoch import MARK_BYTES_MAX
from tiered_kv.toolkit.small_files import read_file, replace_file
from tiered_kv_fs.full_disk import with_room
from tiered_kv_fs.names import EPOCH_NAME


class EpochFile:
    """An `EpochStore`. A call exceeds its deadline while the file system hangs, since nothing can end the call."""

    def __init__(self, namespace_path: str, make_directory: Callable[[], None]) -> None:
        self._root = os.path.dirname(namespace_path)
        self._path = f"{namespace_path}/{EPOCH_NAME}"
        self._make_directory = make_directory

    def read(self, deadline: float) -> bytes | None:
        data = read_file(self._path, MARK_BYTES_MAX)
        return b"" if data is None and os.path.lexists(self._path) else data

    def create(self, data: bytes, deadline: float) -> None:
        self._make_directory()
        with_room(self._root, partial(replace_file, self._path, data, only_new=True))

    def write(self, data: bytes, deadline: float) -> None:
        self._make_directory()
        with_room(self._root, partial(replace_file, self._path, data))

    def remove(self, deadline: float) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
