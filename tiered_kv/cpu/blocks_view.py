"""The blocks of the primary tier by key, for callers that want objects: tests, programs and the older interface.

`PrimaryRows.blocks` makes one. The manager's thread reads it. It has no state of its own, and each block is made when
it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.key_index import KeyIndex
from tiered_kv.cpu.row_table import RowTable


class BlocksView(Mapping[OffloadKey, CPUBlock]):
    """All blocks that are ready, pinned or being written."""

    def __init__(self, index: KeyIndex, writing: Mapping[OffloadKey, int], table: RowTable) -> None:
        self._index, self._writing, self._table = index, writing, table

    def __getitem__(self, key: OffloadKey) -> CPUBlock:
        row = self._index.get(key)
        return CPUBlock(self._writing[key] if row is None else row, self._table)

    def __iter__(self) -> Iterator[OffloadKey]:
        yield from (key for key, _ in self._index.items())
        yield from self._writing

    def __len__(self) -> int:
        return len(self._index) + len(self._writing)
