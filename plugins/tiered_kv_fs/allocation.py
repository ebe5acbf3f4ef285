"""The disk space of a file: its size in whole allocation units. `Allocation` learns the unit from files.

`GrantClient`, `BlockFiles` and the sweep call it, on any thread. Each file counts as whole units, so files occupy
no more space than the tier counts for them.
"""

from __future__ import annotations

import os
import stat
from typing import Final

UNIT_BYTES_MIN: Final = 4096
_UNIT_BYTES_MAX: Final = 64 << 20
_ENTRY_BYTES: Final = 512  # growth of a directory by one entry, at most


class Allocation:
    """The room that files of a directory's file system occupy. Any thread may call.

    A file system does not report its allocation unit (ext4 with bigalloc, XFS with an extent size hint, records of
    ZFS). Some file systems allocate only seconds after a write. So a file is charged in whole units before it is
    written, and the unit grows when a file occupies more. XFS may allocate more space only while a file is open.
    """

    def __init__(self) -> None:
        self.unit_bytes = UNIT_BYTES_MIN
        self._open_unit_bytes = UNIT_BYTES_MIN  # the unit of a file that is being written
        self._is_news = False  # the unit has grown in this process, and the ledger does not have it

    @property
    def opening_bytes(self) -> int:
        """Bytes for the small files and directories of each opening. The ledger never grants these bytes."""
        return 8 * (self.unit_bytes + UNIT_BYTES_MIN)

    def charge_bytes(self, size_bytes: int) -> int:
        """Return the bytes to charge for a new file of `size_bytes`, with its entry in a directory."""
        return round_up(size_bytes, self.unit_bytes) + _ENTRY_BYTES

    def room_bytes(self, size_bytes: int) -> int:
        """Return the most bytes that storing a file of `size_bytes` may take: the file, and a directory for it."""
        unit_bytes = max(self.unit_bytes, self._open_unit_bytes)
        return round_up(size_bytes, unit_bytes) + _ENTRY_BYTES + self.unit_bytes

    def learn_open(self, status: os.stat_result) -> None:
        """Learn from the status of a file that is being written: the file may occupy less once it is closed."""
        self._open_unit_bytes = unit_of(status, self._open_unit_bytes)

    def learn(self, status: os.stat_result) -> bool:
        """Learn from a file's status; return whether the unit has grown."""
        before = self.unit_bytes
        self.unit_bytes = unit_of(status, before)
        if self.unit_bytes == before:
            return False
        self._is_news = True
        return True

    def share(self, unit_bytes: int) -> int:
        """Exchange units with the ledger; return the unit that the ledger is to keep.

        This takes the ledger's `unit_bytes`, which a survey may have lowered. It keeps a larger own unit if that is new
        to the ledger, or if the ledger has none (0).
        """
        self.unit_bytes = max(unit_bytes, self.unit_bytes) if self._is_news or not unit_bytes else unit_bytes
        self._is_news = False
        return self.unit_bytes


def unit_of(status: os.stat_result, unit_bytes: int) -> int:
    """Double `unit_bytes` until the file's size in whole units covers the file's disk space; return the result."""
    while (
        stat.S_ISREG(status.st_mode)
        and status.st_size
        and unit_bytes < _UNIT_BYTES_MAX
        and round_up(status.st_size, unit_bytes) < status.st_blocks * 512
    ):
        unit_bytes *= 2
    return unit_bytes


def round_up(size_bytes: int, unit_bytes: int = UNIT_BYTES_MIN) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


def occupied_bytes(status: os.stat_result, unit_bytes: int = UNIT_BYTES_MIN) -> int:
    """Return the disk space of a file or directory, also if the file system has not allocated it yet."""
    allocated_bytes = status.st_blocks * 512
    if allocated_bytes >= status.st_size or not stat.S_ISREG(status.st_mode):
        return allocated_bytes
    return round_up(status.st_size, unit_bytes)
