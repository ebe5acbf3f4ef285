"""The epoch of a directory: a number that every batch carries; see `tiered_kv.toolkit.epoch`.

A batch whose epoch is not the directory's holds no valid block. So a reset of the cache is one small write to a file.
It is buffered: the kernel's page cache survives the process, and `sync` makes the write survive a power failure.
"""

from __future__ import annotations

import errno
import math
import os
import threading

from tiered_kv.permissions import check_file
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, Epoch
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS
from tiered_kv_nvme.layout import PAGE_BYTES

EPOCH_NAME = "epoch"


class DirectoryEpoch:
    """The epoch of a directory that this process owns, and the file that keeps its mark.

    Any thread may call, but `renew` belongs to the scheduler's.

    Args:
        directory_fd: The directory, open.

    Raises:
        FormatError: Another version of this project wrote the mark.
        OSError: The file cannot be read or written.
    """

    def __init__(self, directory_fd: int) -> None:
        self._lock = threading.Lock()  # for the order of writes and flushes; `renew` does not take it
        self._directory_fd = directory_fd
        self._file = _MarkFile(directory_fd)
        self._flushed: int | None = None  # the file's content after a loss of power, as far as is known
        self._epoch = Epoch(self._file)
        try:
            was_found = self._file.read(math.inf)
            self.value = self.write()
            """The epoch of new blocks."""
            is_new = self._file.read(math.inf) != was_found
            try:
                self.sync()  # a process that was killed may not have flushed it
            except OSError:
                if is_new:
                    raise
        except BaseException:
            self._file.close()
            raise

    def renew(self) -> int:
        """Make all stored blocks invalid, and return the new epoch; `write` stores it. No I/O."""
        self.value = int(self._epoch.renew(), 16)
        return self.value

    def write(self) -> int:
        """Store the epoch so that it survives the process: one small buffered write.

        Returns:
            The epoch that was written.

        Raises:
            OSError: It is not in the file; the next call tries again.
        """
        with self._lock:
            return int(self._epoch.saved_token(math.inf), 16)

    def sync(self) -> None:
        """Wait until the epoch is on the device.

        Raises:
            OSError: It is not.
        """
        value = self.write()
        try:
            self._file.flush()
        except OSError:
            self._epoch.save_again()  # the kernel may have dropped the page
            raise
        self._flushed = value

    def discard(self) -> None:
        """Remove a file whose old epoch cannot be overwritten: the next opening begins a new epoch.

        Raises:
            OSError: It may not have been removed. Then blocks from before the reset may come back.
        """
        with self._lock:
            if self._flushed != self.value:
                os.unlink(EPOCH_NAME, dir_fd=self._directory_fd)
                os.fsync(self._directory_fd)
                self._flushed = self.value  # no file is left with another epoch

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class _MarkFile:
    """The file, as the store of an epoch's mark: one page, preallocated, so that a full disk does not refuse it."""

    def __init__(self, directory_fd: int) -> None:
        self._fd = os.open(EPOCH_NAME, OPEN_FLAGS | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
        try:
            if check_file(self._fd, EPOCH_NAME).st_size != PAGE_BYTES:
                os.ftruncate(self._fd, 0)
                os.posix_fallocate(self._fd, 0, PAGE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, deadline: float) -> bytes:
        return os.pread(self._fd, MARK_BYTES_MAX, 0).rstrip(b"\0")

    def create(self, data: bytes, deadline: float) -> None:
        self.write(data, deadline)

    def write(self, data: bytes, deadline: float) -> None:
        if os.pwrite(self._fd, data.ljust(MARK_BYTES_MAX, b"\0"), 0) != MARK_BYTES_MAX:
            raise OSError(errno.EIO, "the epoch was written in part")

    def flush(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
