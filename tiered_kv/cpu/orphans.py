"""Rows from before a reset: their keys are forgotten, and they become free in later steps.

`PrimaryRows` makes one object, and calls it on the manager's thread. A reset takes as long with a million
rows as with ten: it hands over the index as it is, and `sweep` frees the rows later. A row that is needed sooner is
freed sooner. A row that a transfer uses waits for the transfer's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sized
from typing import Any, Final, Protocol

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.row_table import ABSENT, RowTable, in_writing

SWEEP_BLOCKS: Final = 512
"""Blocks of one sweep, which takes half a millisecond."""


class RowsOwner(Protocol):
    """Gets the keys of the blocks that the primary tier loses, as `BlockHistory` does."""

    def evicted(self, keys: Collection[OffloadKey]) -> None:
        """Take note of blocks that were evicted."""

    def swept(self, keys: Collection[OffloadKey]) -> None:
        """Take note of blocks from before a reset that a sweep has come to."""


class Orphans:
    """The rows from before resets.

    A row in use stays until its transfer ends. The call that ends the transfer names only the key, and must find this
    row. Until then its key cannot be stored again. All other rows become free when they are swept.

    Args:
        table: The state of the rows.
        free: Frees rows.

    Attributes:
        exist: Whether there are rows from before a reset; hot paths read it.
        unswept: The indexes that sweeps have not emptied yet, the oldest first.
        owner: Gets the keys that a sweep has taken; optional.
    """

    def __init__(self, table: RowTable, free: Callable[[Collection[int]], None]) -> None:
        self._table = table
        self._free = free
        self._in_use: dict[OffloadKey, int] = {}  # swept rows that a transfer still uses
        self.unswept: deque[dict[OffloadKey, int]] = deque()
        self._remains: deque[Any] = deque()  # Any: dictionaries and lists of policies, which are dropped in parts
        self.exist = False
        self.owner: RowsOwner | None = None

    def __contains__(self, key: OffloadKey) -> bool:
        return self.get(key) is not None

    @property
    def are_in_use(self) -> bool:
        """Whether a transfer uses a row from before a reset."""
        ref_cnt = self._table.ref_cnt
        return bool(self._in_use) or any(row < 0 or ref_cnt[row] for index in self.unswept for row in index.values())

    def get(self, key: OffloadKey) -> int | None:
        """Return the row of this key that a transfer uses; None without one."""
        row = self._in_use.get(key)
        if row is None:
            ref_cnt = self._table.ref_cnt
            found = (_row_in(index, key) for index in self.unswept)
            row = next((each for each in found if each is not None and ref_cnt[each]), None)
        return row

    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the rows of these keys that a transfer uses."""
        return [row for row in map(self.get, keys) if row is not None]

    def add(self, index: dict[OffloadKey, int], remains: list[Any]) -> None:
        """Take over the index of a primary tier at a reset, and its policy's lists; nobody else uses them."""
        if index:
            self.unswept.append(index)
            self.exist = True
        self._remains.extend(remains)

    def remove(self, row: int) -> bool:
        """Remove a row, which the caller then frees; return whether it was here."""
        key = self._table.key[row]
        if self._in_use.get(key) == row:
            del self._in_use[key]
        else:
            index = next((each for each in self.unswept if _row_in(each, key) == row), None)
            if index is None:
                return False
            del index[key]
        self._note()
        return True

    def sweep(self, count: int = SWEEP_BLOCKS) -> int:
        """Take the next `count` rows, and free those that are unused; return how many became free."""
        freed, ref_cnt = 0, self._table.ref_cnt
        while count > 0 and self.unswept:
            index = self.unswept[0]
            taken = [index.popitem() for _ in range(min(count, len(index)))]
            swept = [(key, row if row >= 0 else in_writing(row)) for key, row in taken]
            if not index:
                self.unswept.popleft()
            count -= len(swept)
            self._drop(len(swept))
            self._in_use.update(each for each in swept if ref_cnt[each[1]])
            unused = [row for _, row in swept if not ref_cnt[row]]
            self._free(unused)
            freed += len(unused)
            if self.owner is not None:
                self.owner.swept([key for key, _ in swept])
        self._note()
        return freed

    def make_room(self, rows: int) -> None:
        """Free at least `rows` rows, or all that no transfer uses."""
        while rows > 0 and self.unswept:
            rows -= self.sweep(max(rows, SWEEP_BLOCKS))

    def _drop(self, count: int) -> None:
        """Drop what policies kept in parts: to drop all at once takes 20 ms for a million blocks."""
        while count > 0 and self._remains:
            part = self._remains[0]
            if isinstance(part, dict) and part:
                _, dropped = part.popitem()
                count -= 1 + (len(dropped) if isinstance(dropped, Sized) else 0)
            elif isinstance(part, list) and part:
                del part[-count:]
                count -= 1
            else:
                self._remains.popleft()
        if not self.unswept:
            self._remains.clear()

    def _note(self) -> None:
        self.exist = bool(self._in_use or self.unswept)


def _row_in(index: dict[OffloadKey, int], key: OffloadKey) -> int | None:
    """Return the row of a key in an index of `PrimaryRows`, in any state; None if it has none."""
    row = index.get(key, ABSENT)
    return row if row >= 0 else None if row == ABSENT else in_writing(row)
