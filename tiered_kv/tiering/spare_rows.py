"""The request that is audited, and spare rows: rows of the primary tier that take a second copy of a block."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.base import OffloadKey, ReqContext, get_offload_group_idx
from tiered_kv.cpu.backend import PROMOTION, CPUBlock
from tiered_kv.cpu.manager import PRIMARY_NAME, CPUOffloadingManager
from tiered_kv.tiering.comparison import difference_of
from tiered_kv.tiering.guarded import GuardedTier

BLOCKS_MAX: Final = 64
"""Spare rows at one time, and blocks of one request that are compared."""
ROWS_SHARE: Final = 8
"""At most one row of the primary tier in so many is a spare row."""

_SPARE_KEY: Final = b"\0tiered-kv audit "


@dataclass(slots=True, eq=False)
class Audited:
    """The request that is being audited.

    Attributes:
        context: The audit's own towards the tiers, so that their answers outlive the request.
        until_s: When the audit is given up.
        first_key: The first key that was withheld. An engine looks up blocks that it has neither computed nor kept. So
            the blocks that it stores from this key on, in the same group, are computed anew.
        storer: The request that stores `first_key`. A program's `get` and `put` are two requests.
        is_finished: Whether the request has ended; only then may another be the storer.
        is_taking: Whether further blocks are compared.
        taken: Blocks that were considered.
        asked: Blocks that the storer is storing, with the tier that has them; None while that is not known.
        compared: How many copies have been compared.
        different: Keys of those that differ.
        largest: The largest difference so far.
    """

    req_id: str
    context: ReqContext
    until_s: float
    first_key: OffloadKey | None = None
    storer: str | None = None
    is_finished: bool = False
    is_taking: bool = True
    taken: set[OffloadKey] = field(default_factory=set)
    asked: dict[OffloadKey, GuardedTier | None] = field(default_factory=dict)
    compared: int = 0
    different: list[OffloadKey] = field(default_factory=list)
    largest: float = 0.0

    def computed(self, req_id: str, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those of `keys`, which a request stores, that this one computed anew and has not considered yet."""
        if not req_id or not self.is_taking or self.first_key is None:
            return []
        if self.storer is None and (req_id == self.req_id or self.is_finished) and self.first_key in keys:
            self.storer = req_id
        if self.storer != req_id:
            return []
        ordered, group = list(dict.fromkeys(keys)), get_offload_group_idx(self.first_key)
        first = ordered.index(self.first_key) if self.first_key in ordered else 0
        return [key for key in ordered[first:] if get_offload_group_idx(key) == group and key not in self.taken]


@dataclass(slots=True, eq=False)
class Pair:
    """Two copies of a block: one under its key, pinned, and one in a spare row.

    Attributes:
        audited: The request that they are compared for.
        tier: The tier of the stored copy.
        block: The block under its key.
        spare: The spare row; its `writer` is the request whose store fills it, or `PROMOTION` if a tier's load does.
    """

    audited: Audited
    tier: str
    block: CPUBlock
    spare: CPUBlock


class SpareRows:
    """Gives blocks of the primary tier a spare row each. A thread of its own compares both.

    No lookup ever finds a spare row: its key is no block's, and it stays in state writing.

    Owned by the manager's thread. `dtype` is the type of the blocks' values, as the namespace names it.
    """

    def __init__(self, primary: CPUOffloadingManager, dtype: str) -> None:
        self._primary = primary
        self._dtype = dtype
        self._thread = ThreadPoolExecutor(1, "tiered-kv-audit")  # begins with the first comparison
        self._comparing: deque[tuple[Pair, Future[float]]] = deque()
        self._rows_max = max(min(BLOCKS_MAX, primary.backend.num_blocks // ROWS_SHARE), 1)
        self._pairs: set[Pair] = set()
        self._expired_rows = 0
        self._numbers = itertools.count()

    @property
    def room(self) -> int:
        """Rows that may be taken."""
        return self._rows_max - len(self._pairs) - self._expired_rows

    @property
    def in_flight(self) -> int:
        """Comparisons that have not ended."""
        return len(self._comparing)

    def pending(self, audited: Audited) -> int:
        """Return how many pairs of a request have not been compared."""
        return sum(pair.audited is audited for pair in self._pairs)

    def pair(
        self,
        audited: Audited,
        blocks: Sequence[CPUBlock],
        req_context: ReqContext,
        evicted: list[OffloadKey],
        tier: str = "",
    ) -> list[Pair]:
        """Pin ready blocks and give each a spare row; return none if there is no room for all of them.

        The blocks of `req_context`, which stores them, are evicted last; `evicted` gets the keys of those that are.
        A load from `tier` fills the rows, or by default that request. Then the stored copies are the blocks themselves.
        """
        self._primary.pin(blocks)
        names = [OffloadKey(_SPARE_KEY + next(self._numbers).to_bytes(8, "big")) for _ in blocks]
        writer = PROMOTION if tier else req_context.req_id
        spares = self._primary.allocate(names, writer, self._primary.chain_of(req_context), evicted)
        if spares is None:
            self._primary.unpin(blocks)
            return []
        pairs = [
            Pair(audited, tier or block.source or PRIMARY_NAME, block, spare)
            for block, spare in zip(blocks, spares, strict=True)
        ]
        self._pairs.update(pairs)
        return pairs

    def compare(self, pair: Pair) -> None:
        """Compare two complete copies; `take` returns and releases them."""
        rows = pair.spare.block_id, pair.block.block_id
        stored_row, computed_row = rows if pair.spare.writer is PROMOTION else reversed(rows)
        self._comparing.append((pair, self._thread.submit(self._difference, stored_row, computed_row)))

    def take(self) -> list[tuple[Pair, float | None]]:
        """Return what has been compared since the last call, released; None where that was not possible."""
        compared: list[tuple[Pair, float | None]] = []
        while self._comparing and self._comparing[0][1].done():
            pair, future = self._comparing.popleft()
            self.release(pair)
            compared.append((pair, None if future.exception() else future.result()))  # for example, too little memory
        return compared

    def release(self, pair: Pair) -> None:
        """Unpin a block, and free its spare row, which no job uses any more."""
        self._primary.abandon([pair.spare])
        self._primary.unpin([pair.block])
        self._pairs.remove(pair)

    def expire(self, pair: Pair) -> None:
        """Unpin a block whose spare row a tier may still be writing into; `free` follows."""
        self._primary.forget(pair.spare)
        self._primary.unpin([pair.block])
        self._pairs.remove(pair)
        self._expired_rows += 1

    def free(self, pair: Pair) -> None:
        """Free the spare row of an expired load that has ended."""
        self._primary.backend.free(pair.spare)
        self._expired_rows -= 1

    def stop(self, timeout_s: float) -> None:
        """End the comparing thread after its last comparison; wait at most `timeout_s`."""
        running = wait([future for _, future in self._comparing], timeout_s).not_done
        self._thread.shutdown(wait=not running)

    def _difference(self, stored_row: int, computed_row: int) -> float:
        region = self._primary.backend.region  # no array is kept beyond the next line: it would keep the memory mapped
        return difference_of(region.array[stored_row], region.array[computed_row], self._dtype)
