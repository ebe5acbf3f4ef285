"""System calls on segment files, and the counters of the store.

Writers, readers, the reclaimer and recovery call `Disk`, on their own threads. Tests pass a disk with faults in its
place. A transfer gives way to a step of the scheduler before it returns, so its caller holds no lock.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence

import numpy as np

from tiered_kv.metrics.counters import Counters
from tiered_kv.system.file_systems import allocate
from tiered_kv.system.step import give_way
from tiered_kv.toolkit.codecs import HUGE_PAGE_BYTES, ThreadBuffer
from tiered_kv.toolkit.small_files import FirstFailures, write_all
from tiered_kv_nvme.layout import PAGE_BYTES
from tiered_kv_nvme.metrics import METRICS

OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
FILE_MODE = 0o600

_SECTOR_BYTES_MIN = 512

_log = logging.getLogger("tiered_kv.nvme")


class Disk:
    """Every transfer, allocation and flush of a segment; tests pass a faulty disk. Any thread may call.

    Transfers give way to a scheduler's step before they return, so no caller may hold a lock.
    """

    writes_zeros = False  # whether the file system has no fallocate(2)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        written = os.pwritev(fd, buffers, offset)
        give_way()
        return written

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(fd, buffers, offset)
        give_way()
        return count

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Allocate a new file. Where the file system has no fallocate(2), zeros are written."""
        if allocate(fd, 0, size_bytes):
            return
        self.writes_zeros = True
        zeros = ThreadBuffer().take(min(size_bytes, HUGE_PAGE_BYTES))
        for offset in range(0, size_bytes, len(zeros)):
            write_all(fd, [zeros[: size_bytes - offset]], offset, pwritev=self.pwritev)

    def datasync(self, fd: int) -> None:
        os.fdatasync(fd)


class DirectMemory:
    """Decides which memory the disk can transfer without a buffer of the tier. Any thread may call.

    Direct I/O wants memory at a multiple of the disk's sector. With other memory, the kernel may move megabytes and
    then refuse the rest (EINVAL), and everything would move twice. So addresses are checked before a transfer: they
    must be multiples of 512 or, once the disk has refused such memory, of a page.

    Args:
        is_direct: Whether files are opened with O_DIRECT; otherwise any memory will do.
        is_in_pages: Whether all blocks of the caller begin on a page, so that no address is checked.
    """

    def __init__(self, *, is_direct: bool, is_in_pages: bool) -> None:
        self._mask = _SECTOR_BYTES_MIN - 1 if is_direct and not is_in_pages else 0  # 0: all suit

    def suits(self, blocks: Iterable[memoryview]) -> bool:
        """Return whether all blocks begin at addresses that direct I/O takes."""
        mask = self._mask
        return not mask or not any(address_of(block) & mask for block in blocks)

    def is_refusal(self, error: OSError) -> bool:
        """Return whether a transfer may have failed because of its memory. If so, accept only pages from now on."""
        if error.errno != errno.EINVAL:
            return False
        if self._mask:
            self._mask = PAGE_BYTES - 1
        return True


def address_of(block: memoryview) -> int:
    """Return where in memory a block begins."""
    address: int = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
    return address


class StoreCounters(Counters):
    """Counts events of the store in the directory at `path`, and logs the first failure of each kind."""

    def __init__(self, path: str) -> None:
        super().__init__(METRICS)
        self._failures = FirstFailures(_log, path)

    def note_io_error(self, operation: str, error: OSError) -> None:
        self.add("io_errors_total")
        self._failures.note(operation, error)

    def explain(self, reason: str) -> str | None:
        """Return the last failure for a reason; see `SecondaryTierManager.explain_failure`. Any thread."""
        return self._failures.texts.of(reason)
