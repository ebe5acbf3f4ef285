"""The epoch of a directory: a random number that every batch carries.

A batch whose epoch is not the directory's holds nothing. So a reset of the cache is the store of one number, and it
must survive the process without I/O on the thread that resets: the number lives in a file that is
mapped shared, where a store is the kernel's at once, whatever becomes of the process.
"""

from __future__ import annotations

import mmap
import os
import secrets

from tiered_kv_nvme.disk import FILE_MODE, OPEN_FLAGS
from tiered_kv_nvme.layout import PAGE_BYTES

EPOCH_NAME = "epoch"

_MAGIC = int.from_bytes(b"TKVNEPO1", "little")
_MASK = (1 << 64) - 1


class Epoch:
    """The mapped epoch file.

    A file that is missing, damaged or half written makes a new epoch: losing blocks is allowed, bringing
    reset ones back is not.

    Args:
        directory_fd: The directory, open.
    """

    def __init__(self, directory_fd: int) -> None:
        fd = os.open(EPOCH_NAME, OPEN_FLAGS | os.O_CREAT, FILE_MODE, dir_fd=directory_fd)
        try:
            if os.fstat(fd).st_size != PAGE_BYTES:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, PAGE_BYTES)
            self._map = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        # Words, not bytes: each is stored by one instruction and so is never half written.
        self._words = memoryview(self._map).cast("Q")
        magic, value, complement = self._words[0], self._words[1], self._words[2]
        self.value = value
        """The epoch of what is stored now."""
        if magic != _MAGIC or value != complement ^ _MASK:
            self.renew()
            self._words[0] = _MAGIC
            self.sync()

    def renew(self) -> None:
        """Void everything that was stored before. Does no I/O; `sync` makes it outlast a power failure."""
        self.value = secrets.randbits(64)
        self._words[1] = self.value
        self._words[2] = self.value ^ _MASK

    def sync(self) -> None:
        """Wait until the epoch is on the device."""
        self._map.flush()

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()
