"""The epoch of a directory: a number in each batch. A batch of another epoch holds no valid block.

The store reads it when it opens the directory. A reset begins a new epoch on the scheduler's thread, without I/O; a
background task writes the epoch to its file. The small write survives the process, and a flush lets it survive a power
failure. Without a readable epoch, no block from before is valid. See `tiered_kv.toolkit.epoch`.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from contextlib import suppress

from tiered_kv.system.file_systems import is_full
from tiered_kv.system.permissions import check_file
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, Epoch
from tiered_kv.toolkit.small_files import has_name
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS, Disk
from tiered_kv_nvme.layout import PAGE_BYTES

EPOCH_NAME = "epoch"


class DirectoryEpoch:
    """The epoch of a directory that this process owns, and the file that keeps its mark (an `EpochStore`).

    The file is preallocated, so that a full disk cannot refuse a reset. If the disk was full before there was a file,
    `remake` makes it later. The scheduler's thread calls `renew`; other threads call the rest.

    Raises:
        FormatError: Another version of this project wrote the mark.
        OSError: The file cannot be read or written.
    """

    def __init__(self, directory_fd: int, *, private: bool = True) -> None:
        self._directory_fd = directory_fd
        self._private = private
        self._fd = -1  # there is no file
        self._epoch = Epoch(self, is_shared=False)
        self._lock = threading.Lock()  # held while the file is made; `sync` and `remake` run on two threads
        self._flushed: int | None = None  # the last epoch that is known to be on the device
        self.value: int
        """The epoch of blocks that are stored now."""
        try:
            try:
                self._fd = self._open()
                self.value = self._save()
            except OSError as error:
                if not is_full(error):
                    raise
                self.renew()  # if there is no mark, no earlier block is valid
            else:
                self._flush(self.value)  # the process before may have been killed before its flush
        except BaseException as error:
            if isinstance(error, OSError) and is_full(error):
                return  # the mark is in the page cache
            if self._fd >= 0:
                os.close(self._fd)
            raise

    @property
    def is_new(self) -> bool:
        """Whether the directory had no usable mark when it was opened: its earlier segments hold no valid block."""
        return self._epoch.has_drawn or self._fd < 0

    @property
    def is_saved(self) -> bool:
        """Whether the file has the epoch."""
        return self._epoch.is_saved

    def renew(self) -> int:
        """Begin a new epoch and return it; `sync` writes it. No I/O."""
        self.value = int(self._epoch.renew(), 16)
        return self.value

    def sync(self) -> None:
        """Write the epoch if the file does not have it yet, and flush it.

        Raises `OSError`: the write or the flush failed; the next call tries again.
        """
        with self._lock:
            if self._fd < 0:
                self._fd = self._open()
        self._flush(self._save())

    def remake(self) -> None:
        """Make the file again if somebody has deleted it, or if the disk was full.

        Raises `OSError`: that failed; a restart would find no blocks.
        """
        if self._fd < 0 or not self._epoch.is_saved:
            self.sync()
        with self._lock:
            if has_name(EPOCH_NAME, self._fd, dir_fd=self._directory_fd):
                return
            fd = self._open()
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            self._epoch.save_again()
        self.sync()

    def close(self) -> None:
        """Flush and close the file; if that fails, remove it: the next opening then begins a new epoch.

        Raises `OSError`: the removal failed, or a power failure may undo it. Blocks from before a reset may come back.
        """
        if self._flushed != self.value:
            with suppress(OSError):
                self.sync()
        if self._fd >= 0:
            os.close(self._fd)
        if self._flushed != self.value:
            with suppress(FileNotFoundError):
                os.unlink(EPOCH_NAME, dir_fd=self._directory_fd)
            os.fsync(self._directory_fd)

    def _open(self) -> int:
        fd = os.open(EPOCH_NAME, OPEN_FLAGS | os.O_CREAT, FILE_MODE, dir_fd=self._directory_fd)
        try:
            if check_file(fd, EPOCH_NAME, any_owner=not self._private).st_size != PAGE_BYTES:
                os.ftruncate(fd, 0)
                Disk().fallocate(fd, PAGE_BYTES)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _flush(self, value: int) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError:
            self._epoch.save_again()  # the kernel may have dropped the page
            raise
        self._flushed = value

    def _save(self) -> int:
        """Write the epoch if the file does not have it yet, and return it."""
        return int(self._epoch.saved_value(math.inf), 16)

    # `EpochStore`.

    def read(self, deadline: float) -> bytes | None:
        return os.pread(self._fd, MARK_BYTES_MAX, 0).rstrip(b"\0") or None

    def write(self, data: bytes, deadline: float) -> None:
        if os.pwrite(self._fd, data.ljust(MARK_BYTES_MAX, b"\0"), 0) != MARK_BYTES_MAX:
            raise OSError(errno.EIO, "the epoch was written in part")

    create = write  # the directory has one owner
