"""The epoch of a directory: a random number that every batch carries.

A batch whose epoch is not the directory's holds nothing. So a reset of the cache is one small write to a file. It is
buffered: what is in the kernel's page cache survives the process, and `sync` makes it survive a power failure.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import threading

from tiered_kv.permissions import check_file
from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS
from tiered_kv_nvme.layout import PAGE_BYTES

EPOCH_NAME = "epoch"

_MAGIC = b"TKVNEPO1"
_MASK = (1 << 64) - 1
_RECORD = struct.Struct("<8sQQ")  # magic, epoch, the epoch with every bit inverted


class Epoch:
    """The epoch file.

    A file that is missing, damaged or half written makes a new epoch: losing blocks is allowed, bringing
    reset ones back is not.

    Args:
        directory_fd: The directory, open.

    Raises:
        OSError: The file cannot be read or written.
    """

    def __init__(self, directory_fd: int) -> None:
        self._lock = threading.Lock()  # for the order of writes; the scheduler's thread does not take it
        self._directory_fd = directory_fd
        self._fd = os.open(EPOCH_NAME, OPEN_FLAGS | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
        try:
            if check_file(self._fd, EPOCH_NAME).st_size != PAGE_BYTES:
                os.ftruncate(self._fd, 0)
                os.posix_fallocate(self._fd, 0, PAGE_BYTES)
            record = os.pread(self._fd, _RECORD.size, 0)
            magic, value, complement = _RECORD.unpack(record.ljust(_RECORD.size, b"\0"))
            is_sound = magic == _MAGIC and value == complement ^ _MASK
            self.value = value if is_sound else secrets.randbits(64)
            """The epoch of what is stored now."""
            self._written = value if is_sound else None  # what the page cache holds, as far as is known
            self._flushed = self._written  # what the file says after a loss of power, too, as far as is known
            if not is_sound:
                self.sync()
            else:
                try:
                    os.fdatasync(self._fd)  # a process that was killed may not have come to it
                except OSError:
                    self._written = self._flushed = None  # the kernel may have dropped the page
        except BaseException:
            os.close(self._fd)
            raise

    def renew(self) -> None:
        """Void everything that was stored before; `write` puts it down. The scheduler's thread; no I/O."""
        self.value = secrets.randbits(64)

    def write(self) -> int:
        """Put the epoch down where a process that is killed does not lose it: one small buffered write.

        Returns:
            What was written.

        Raises:
            OSError: It is not in the file; the next call tries again.
        """
        with self._lock:
            value = self.value
            if self._written != value:
                self._write(value)
            return value

    def sync(self) -> None:
        """Wait until the epoch is on the device.

        Raises:
            OSError: It is not.
        """
        value = self.write()
        try:
            os.fdatasync(self._fd)
        except OSError:
            with self._lock:
                self._written = None  # the kernel may have dropped the page
            raise
        self._flushed = value

    def discard(self) -> None:
        """Remove a file that still says an epoch that is over, as none can be written: who opens next begins a new one.

        Raises:
            OSError: It cannot be removed either, or not for certain. Then what was reset may come back.
        """
        with self._lock:
            if self._flushed != self.value:
                os.unlink(EPOCH_NAME, dir_fd=self._directory_fd)
                os.fsync(self._directory_fd)
                self._flushed = self.value  # there is nothing left that says another

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, value: int) -> None:
        record = _RECORD.pack(_MAGIC, value, value ^ _MASK)
        if os.pwrite(self._fd, record, 0) != len(record):
            raise OSError(errno.EIO, "the epoch was written in part")
        self._written = value
