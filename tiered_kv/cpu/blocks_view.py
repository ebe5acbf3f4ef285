"""The blocks of the primary tier by key, for callers that want objects: tests, programs and the older interface.

`PrimaryRows.blocks` makes one. The manager's thread reads it. It has no state of its own, and each block is made when
it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.row_table import RowTable, in_writing


class BlocksView(Mapping[OffloadKey, CPUBlock]):
    """All blocks that are ready, pinned or being written."""

    def __init__(self, index: Mapping[OffloadKey, int], table: RowTable) -> None:
        self._index, self._table = index, table

    def __getitem__(self, key: OffloadKey) -> CPUBlock:
        row = self._index[key]
        return CPUBlock(row if row >= 0 else in_writing(row), self._table)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)
