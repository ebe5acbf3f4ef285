"""The rows of the primary tier: which are free, and a view of each block for callers of the older interface.

`PrimaryRows` owns it, on the scheduler's thread. What must stay true: a row belongs to one block, and is free only
while no transfer and no pin uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tiered_kv.backend import Backend, BlockStatus
from tiered_kv.base import OffloadKey
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.row_table import A_LOAD, NO_KEY, RowTable, unwatched
from tiered_kv.mediums import CPULoadStoreSpec


class CPUBlock(BlockStatus):
    """A view of one row: its state as attributes. Made when asked for, and kept by nobody here.

    Attributes:
        block_id: The number of the row.
    """

    __slots__ = ("_table", "block_id")

    def __init__(self, block_id: int, table: RowTable) -> None:
        self.block_id = block_id
        self._table = table

    @property
    def ref_cnt(self) -> int:
        """-1 while it is written, else the number of transfers that use it."""
        loads, others = divmod(self._table.ref_cnt[self.block_id], A_LOAD)
        return loads + others if loads >= 0 else -1

    @ref_cnt.setter
    def ref_cnt(self, count: int) -> None:
        self._table.ref_cnt[self.block_id] = count

    @property
    def key(self) -> OffloadKey:
        """The key of its block; `NO_KEY` while it is free."""
        return self._table.key[self.block_id]

    @property
    def chain(self) -> RequestChain | None:
        """See `RowTable.chain`."""
        chain: RequestChain | None = self._table.chain[self.block_id]
        return chain

    @property
    def position(self) -> int:
        """Its position in `chain`."""
        return self._table.position[self.block_id]


class CPUBackend(Backend):
    """Allocates the rows of a `PrimaryRegion`. Owned by the manager's thread."""

    def __init__(self, region: PrimaryRegion) -> None:
        super().__init__(block_size=region.block_bytes, medium=CPULoadStoreSpec.medium())
        self.region = region
        self.num_blocks = region.num_blocks
        self.table = RowTable(region.num_blocks)
        self._free: list[int] = unwatched([])  # free rows that have been used; the last is allocated first

    @property
    def is_growing(self) -> bool:
        """Whether further rows may become free without an eviction: their memory is being allocated."""
        return False

    def get_num_free_blocks(self) -> int:
        return len(self._free) + self.num_blocks - len(self.table)

    def allocate(self, keys: Sequence[OffloadKey], writer: int = -1, source: int = 0) -> list[int]:
        """Allocate a row for each key; the caller has checked that there is room.

        Args:
            keys: The keys of the blocks that the rows are for.
            writer: The `RowTable.ref_cnt` of the rows.
            source: The `RowTable.source` of the rows.
        """
        count = len(keys)
        missing = count - len(self._free)
        if missing > 0:
            assert len(self.table) + missing <= self.num_blocks, "allocate without room"
            # In rising order, so that neighbours in a prefix become neighbours in memory.
            self._free[:0] = self.table.grow(missing)
        if not count:
            return []
        key_of, ref_cnt, source_of = self.table.key, self.table.ref_cnt, self.table.source
        if count == 1:  # a promoted block: its hot path
            row = self._free.pop()
            key_of[row], ref_cnt[row], source_of[row] = keys[0], writer, source
            return [row]
        rows = self._free[-count:]
        del self._free[-count:]
        for row, key in zip(rows, keys, strict=True):
            key_of[row] = key
            ref_cnt[row] = writer
            source_of[row] = source
        return rows

    def free_rows(self, rows: Collection[int]) -> None:
        """Free rows, each once."""
        table, no_key = self.table, NO_KEY
        key_of, ref_cnt, chain = table.key, table.ref_cnt, table.chain
        for row in rows:
            assert key_of[row] is not no_key, "row freed twice"
            key_of[row] = no_key
            ref_cnt[row] = -1
            chain[row] = None
        self._free += rows

    def allocate_blocks(self, block_hashes: Sequence[OffloadKey]) -> list[CPUBlock]:
        return [CPUBlock(row, self.table) for row in self.allocate(block_hashes)]

    def free(self, block: BlockStatus) -> None:
        assert isinstance(block, CPUBlock)
        self.free_rows((block.block_id,))

    def get_load_store_spec(
        self, block_hashes: Iterable[OffloadKey], blocks: Iterable[BlockStatus]
    ) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([block.block_id for block in blocks if isinstance(block, CPUBlock)])
