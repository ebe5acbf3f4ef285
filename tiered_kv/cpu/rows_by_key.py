"""Which blocks the primary tier has: the row of each key, and whether it is ready.

`PrimaryRows` adds what changes them, on the scheduler's thread. What must stay true: a key is here as long as a row
belongs to it, except from before a reset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.blocks_view import BlocksView
from tiered_kv.cpu.recent_uses import RecentUses
from tiered_kv.cpu.row_table import ABSENT, RowTable, in_writing, unwatched
from tiered_kv.cpu.writers import Writers
from tiered_kv.metrics.series import Family


class RowsByKey:
    """The rows of a table by the keys of their blocks."""

    __slots__ = ("__dict__", "index", "ready_min", "step", "step_of")  # hot path: each lookup reads them

    def __init__(self, table: RowTable) -> None:
        self.table = table
        self.index: dict[OffloadKey, int] = unwatched({})
        """The row of each block that is ready or pinned, and `in_writing` of it while it is written: so a lookup need
        not read more. A reset replaces the dictionary."""
        self.ref_cnt, self.step_of = self.table.ref_cnt, self.table.step
        self.ready_min = 0
        """The least row that a lookup may answer at once; more than any row while a request loads nothing."""
        self._writers = Writers()
        self.step = 0
        """Number of the scheduler's step. Blocks with this `step` are not evicted before the step ends."""
        self.recent: RecentUses | None = None
        """Which rows requests have used lately; None while nobody asks (`spare_since`)."""
        self.give_way: Callable[[int], bool] | None = None
        """Lets go of pins that requests need not respect, for so many blocks; returns whether there were any."""

    def __len__(self) -> int:
        """Return the number of blocks that are ready, pinned or being written. Any thread."""
        return len(self.index)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self.index

    def written_for_others(self, keys: Iterable[OffloadKey], writer: str) -> list[OffloadKey]:
        """Return those of `keys` that others than `writer` are writing."""
        number, get, ref_cnt = self._writers.number_of(writer), self.index.get, self.ref_cnt
        return [key for key in keys if (row := get(key, ABSENT)) < ABSENT and ref_cnt[in_writing(row)] != number]

    def spare_since(self, number: int) -> bool:
        """Evict no row in this step that was used since `RecentUses.number` was `number`; return False if unknown."""
        rows = None if self.recent is None else self.recent.since(number)
        step_of, step = self.step_of, self.step
        for row in rows or ():
            step_of[row] = step
        return rows is not None

    def _note_use(self, rows: Sequence[int]) -> None:
        """Note that a request uses rows; the list must not change any more."""
        if self.recent is not None:
            self.recent.note(rows)

    def measure(self) -> Iterable[tuple[str, list[Family]]]:
        """Return counts beside those of `snapshot`, for the registry. Any thread."""
        return ()

    def row_of(self, key: OffloadKey) -> int | None:
        """Return the row of a block that is ready or pinned; None if there is none. Any thread."""
        row = self.index.get(key, ABSENT)
        return row if row >= 0 else None

    @property
    def blocks(self) -> Mapping[OffloadKey, CPUBlock]:
        """A view of all blocks that are ready, pinned or being written."""
        return BlocksView(self.index, self.table)

    def ready(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the rows of those `keys` that are ready or pinned, in this order."""
        return [row for row in map(self.index.get, keys) if row is not None and row >= 0]

    def all_ready(self, keys: Collection[OffloadKey]) -> list[int]:
        """Return the row of each key.

        Raises:
            ValueError: A key is not ready.
        """
        found = self.ready(keys)
        if len(found) < len(keys):
            key = next(key for key in keys if self.row_of(key) is None)
            raise ValueError(f"block {key.hex()} is not ready to be loaded; look keys up in the same step")
        return found
