"""How far a run came that a crash ended."""

from __future__ import annotations

import mmap
import struct


class Progress:
    """How far a writer has come, in memory that it shares with the process that it was forked from."""

    _FIELDS = struct.Struct("<qqqqqq")
    _NAMES = ("reset_asked", "reset_held", "jobs_stored", "newest_stored", "refused", "finished")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._FIELDS.pack_into(self._memory, 0, 0, 0, 0, -1, 0, 0)

    def note(self, name: str, value: int = 1) -> None:
        """Note something."""
        struct.pack_into("<q", self._memory, 8 * self._NAMES.index(name), value)

    def __getitem__(self, name: str) -> int:
        found: int = self._FIELDS.unpack_from(self._memory)[self._NAMES.index(name)]
        return found

    def as_dict(self) -> dict[str, int]:
        """Return all of it."""
        return {name: self[name] for name in self._NAMES}
