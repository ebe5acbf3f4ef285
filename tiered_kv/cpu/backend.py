"""The blocks of the primary tier, their allocation, and the chains of requests.

`PrimaryRows` owns all of it, on the scheduler's thread. The policies read it there, and set the chain and position of
each block. A row belongs to one block, and is free only while no transfer and no pin uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from tiered_kv.backend import Backend, BlockStatus
from tiered_kv.base import OffloadKey
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.hints import Hints
from tiered_kv.mediums import CPULoadStoreSpec

NO_KEY: Final = OffloadKey(b"")
PROMOTION: Final = "\0promotion"
"""The writer of a block that is loaded from a secondary tier; no request has this id."""


_GROUP_BITS = 8
"""Low bits of a position that the engine gives: the last byte of the key, which is of its group's index."""
_uses = itertools.count(1)


class RequestChain:
    """A request in an eviction order, with the position of each block that it has used: its place in the prefix.

    Positions rise from the head to the tail. They are counted in the order of the calls, or come from the engine.

    Attributes:
        hints: The request's hints.
        last_use: When the request last used or allocated blocks, as a number that rises; set by `refresh`.
        note: The policy's own data of the request.
        position_of: `ReqContext`'s method: returns the token at which a block of the request ends, or None. The
            attribute is None if the engine gives no positions.
        spares_own: Whether none of the request's blocks is evicted to make room for its own later blocks.
        step: The distance between the positions of neighbouring blocks: 1, or larger if the engine gives positions.
    """

    __slots__ = (
        "_extended",
        "_next_position",
        "_ordered",
        "_positions",
        "hints",
        "last_use",
        "note",
        "position_of",
        "spares_own",
        "step",
    )

    def __init__(self) -> None:
        self.hints: Hints | None = None
        self.last_use = 0
        self.note: Any = None  # Any: the policy's own type
        self.position_of: Callable[[OffloadKey], int | None] | None = None
        self.spares_own = False
        self.step = 1
        self._next_position = 0
        self._ordered: tuple[Sequence[CPUBlock], list[int]] | None = None  # the last list of `in_order`, positions
        self._positions: dict[OffloadKey, int] = {}
        self._extended: list[tuple[list[OffloadKey], int]] = []
        """Lists of keys, each with its first key's position. `take` adds them to `_positions`: few requests need it."""

    def refresh(self) -> None:
        """Note that the request uses blocks now."""
        self.last_use = next(_uses)

    def in_order(self, blocks: list[CPUBlock]) -> list[CPUBlock]:
        """Return `blocks` in the order of the request's prefix, over all KV cache groups, if the engine gives it."""
        positions = self._given_positions(blocks) if len(blocks) > 1 else None
        if positions is None:
            return blocks
        ordered = sorted(positions)
        if ordered != positions:
            blocks = [blocks[index] for index in sorted(range(len(blocks)), key=positions.__getitem__)]
        self._ordered = blocks, ordered
        return blocks

    def extend(self, blocks: Sequence[CPUBlock]) -> None:
        """Append `blocks` to the request's blocks, or set the positions that the engine gives.

        No eviction order may contain the blocks now.
        """
        if self._place(blocks):
            return
        position = self._next_position
        self._extended.append(([block.key for block in blocks], position))
        for block in blocks:
            block.chain = self
            block.position = position
            position += 1
        self._next_position = position

    def take(self, blocks: Sequence[CPUBlock]) -> None:
        """Move `blocks`, in the order of the prefix, to this chain. No eviction order may contain them now.

        Blocks that return from another request's chain get their former positions.
        """
        if self._place(blocks):
            return
        known = self._positions
        for keys, first in self._extended:
            known.update(zip(keys, itertools.count(first)))
        self._extended.clear()
        positions = [known.get(block.key, -1) for block in blocks] if known else []
        if positions and all(before < after for before, after in zip([-1, *positions], positions, strict=False)):
            for block, position in zip(blocks, positions, strict=True):
                block.chain = self
                block.position = position
        else:
            self.extend(blocks)

    def finish(self) -> None:
        """Forget the positions: the request has ended and uses no block again."""
        self._positions, self._extended = {}, []
        self._ordered = self.position_of = None

    def _place(self, blocks: Sequence[CPUBlock]) -> bool:
        """Set the positions that the engine gives; return False if it gives none."""
        before = self._next_position >> _GROUP_BITS
        ordered, self._ordered = self._ordered, None
        is_known = ordered is not None and ordered[0] is blocks and len(ordered[1]) == len(blocks)
        given = ordered[1] if ordered is not None and is_known else self._given_positions(blocks)
        if given is None:
            return False
        for index, block in enumerate(blocks):  # a promoted block is alone: `zip(strict=True)` costs more than the loop
            block.chain = self
            position = block.position = given[index]
            tokens = (position >> _GROUP_BITS) - before
            if tokens > 0 and (self.step == 1 or tokens << _GROUP_BITS < self.step):
                self.step = tokens << _GROUP_BITS
            before += tokens
        return True

    def _given_positions(self, blocks: Sequence[CPUBlock]) -> list[int] | None:
        """Return the positions that the engine gives; None if it gives none for the first block.

        Hot path: runs for each block that is stored, loaded or promoted.
        """
        position_of, following = self.position_of, self._next_position
        if position_of is None:
            return None
        given: list[int] = []
        if len(blocks) > 1 and position_of(blocks[0].key) is not None:
            keys = [block.key for block in blocks]
            ends = [end for end in map(position_of, keys) if end is not None]
            if len(ends) == len(keys):  # as always with most engines
                given = [(end << _GROUP_BITS) + key[-1] for end, key in zip(ends, keys, strict=True)]
                self._next_position = max(following, max(given) + 1)
                return given
        for block in blocks:
            key = block.key
            end_token = position_of(key)
            if end_token is not None:
                # Blocks of several groups that end at one token get the same order among themselves in each request.
                position = (end_token << _GROUP_BITS) + key[-1]
            elif given:
                position = following
            else:
                return None
            if position >= following:
                following = position + 1
            given.append(position)
        self._next_position = following
        return given


class CPUBlock(BlockStatus):
    """One row of the region, with the state that the manager and its policy keep of it.

    Attributes:
        block_id: The number of the row.
        key: The key of its block; `NO_KEY` while it is free.
        chain: The request that used it last; None for a block that is free, or was forgotten while in use.
        position: Its position in `chain`, head first.
        step: The last scheduler step in which a lookup found this block.
        loads: How many of its pins are an engine's loads.
        is_frequent: Whether a policy has seen the block used again. Only policies that ask for this set it.
        writer: The id of the request that writes it, or `PROMOTION`; unused once it is ready.
        source: The tier that it was promoted from; empty if the engine stored it.
    """

    # `ref_cnt` is a slot in place of the ctypes structure's field: no native code reads it here, and a slot is faster.
    __slots__ = ("block_id", "chain", "is_frequent", "key", "loads", "position", "ref_cnt", "source", "step", "writer")

    def __init__(self, block_id: int) -> None:
        super().__init__()
        self.block_id = block_id
        self.key = NO_KEY
        self.chain: RequestChain | None = None
        self.position = 0
        self.step = -1
        self.loads = 0
        self.is_frequent = False
        self.writer = ""
        self.source = ""


class CPUBackend(Backend):
    """Allocates the rows of a `PrimaryRegion`. Owned by the manager's thread.

    Block objects are made once and reused, so that a store allocates nothing.
    """

    def __init__(self, region: PrimaryRegion) -> None:
        super().__init__(block_size=region.block_bytes, medium=CPULoadStoreSpec.medium())
        self.region = region
        self.num_blocks = region.num_blocks
        self.made: list[CPUBlock] = []
        """The blocks by row; a block is made when its row is first allocated."""
        self._free: list[CPUBlock] = []  # made blocks whose rows are free; the last is allocated first

    def get_num_free_blocks(self) -> int:
        return len(self._free) + self.num_blocks - len(self.made)

    def allocate_blocks(self, block_hashes: Sequence[OffloadKey]) -> list[CPUBlock]:
        count = len(block_hashes)
        missing = count - len(self._free)
        if missing > 0:
            first = len(self.made)
            assert first + missing <= self.num_blocks, "allocate_blocks without room"
            # In rising order, so that neighbours in a prefix become neighbours in memory.
            self.made += [CPUBlock(block_id) for block_id in range(first, first + missing)]
            self._free[:0] = self.made[first:]
        if not count:
            return []
        if count == 1:  # a promoted block: its hot path
            block = self._free.pop()
            block.key = block_hashes[0]
            return [block]
        blocks = self._free[-count:]
        del self._free[-count:]
        for block, key in zip(blocks, block_hashes, strict=True):
            block.key = key
        return blocks

    def free(self, block: BlockStatus) -> None:
        assert isinstance(block, CPUBlock)
        self.free_all((block,))

    def free_all(self, blocks: Collection[CPUBlock]) -> None:
        """Free blocks together, which costs less than to free each alone. `free` calls it too."""
        append = self._free.append
        for block in blocks:
            assert block.key is not NO_KEY, "block freed twice"
            block.ref_cnt = -1
            block.key = NO_KEY
            block.chain = None
            block.step = -1
            block.is_frequent = False
            block.source = ""
            append(block)

    def get_load_store_spec(
        self, block_hashes: Iterable[OffloadKey], blocks: Iterable[BlockStatus]
    ) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([block.block_id for block in blocks])
