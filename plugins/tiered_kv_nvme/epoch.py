"""The epoch of a directory: a number that every batch carries; see `tiered_kv.toolkit.epoch`.

A batch whose epoch is not the directory's holds no valid block. So a reset of the cache is one small write to a file.
It is buffered: the kernel's page cache survives the process, and `sync` makes the write survive a power failure.
"""

from __future__ import annotations

import errno
import math
import os
from contextlib import suppress

from tiered_kv.permissions import check_file
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, Epoch
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS
from tiered_kv_nvme.layout import PAGE_BYTES

EPOCH_NAME = "epoch"


class DirectoryEpoch:
    """The epoch of an open directory that this process owns, and the file that keeps its mark, an `EpochStore`.

    The file is one page, preallocated, so that a full disk does not refuse it. `renew` belongs to the scheduler's
    thread; one other thread at a time calls the rest.

    Raises:
        FormatError: Another version of this project wrote the mark.
        OSError: The file cannot be read or written.
    """

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._fd = os.open(EPOCH_NAME, OPEN_FLAGS | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
        self._epoch = Epoch(self)
        self._flushed: int | None = None  # what the file says after a loss of power, as far as is known
        try:
            if check_file(self._fd, EPOCH_NAME).st_size != PAGE_BYTES:
                os.ftruncate(self._fd, 0)
                os.posix_fallocate(self._fd, 0, PAGE_BYTES)
            self.value = self.save()
            """The epoch of what is stored now."""
            self.sync()  # a process that was killed may not have come to it
        except BaseException:
            os.close(self._fd)
            raise

    def renew(self) -> int:
        """Void everything that was stored before, and return the new epoch; `save` writes it. No I/O."""
        self.value = int(self._epoch.renew(), 16)
        return self.value

    def save(self) -> int:
        """Write the epoch where a process that is killed does not lose it, one small buffered write; return it.

        Raises:
            OSError: It is not in the file; the next call tries again.
        """
        return int(self._epoch.saved_value(math.inf), 16)

    def sync(self) -> None:
        """Wait until the epoch is on the device.

        Raises:
            OSError: It is not.
        """
        value = self.save()
        try:
            os.fdatasync(self._fd)
        except OSError:
            self._epoch.save_again()  # the kernel may have dropped the page
            raise
        self._flushed = value

    def close(self) -> None:
        """Close the file. Where the epoch cannot be flushed, remove the file: who opens next begins a new epoch.

        Raises:
            OSError: It cannot be removed, or not for certain. Then what was reset may come back.
        """
        if self._flushed != self.value:
            with suppress(OSError):
                self.sync()
        os.close(self._fd)
        if self._flushed != self.value:
            os.unlink(EPOCH_NAME, dir_fd=self._directory_fd)
            os.fsync(self._directory_fd)

    # The epoch's store.

    def read(self, deadline: float) -> bytes:
        return os.pread(self._fd, MARK_BYTES_MAX, 0).rstrip(b"\0")

    def write(self, data: bytes, deadline: float) -> None:
        if os.pwrite(self._fd, data.ljust(MARK_BYTES_MAX, b"\0"), 0) != MARK_BYTES_MAX:
            raise OSError(errno.EIO, "the epoch was written in part")

    create = write  # the directory has one owner
