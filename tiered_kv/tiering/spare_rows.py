"""Spare rows: rows of the primary tier that take a second copy of a block, until both have been compared."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import PROMOTION, CPUBlock
from tiered_kv.cpu.manager import PRIMARY_NAME, CPUOffloadingManager
from tiered_kv.tiering.audited import Audited
from tiered_kv.tiering.comparison import difference_of

BLOCKS_MAX: Final = 64
"""Spare rows at one time, and blocks of one request that are compared."""
ROWS_SHARE: Final = 8
"""At most one row of the primary tier in so many is a spare row."""

_SPARE_KEY: Final = b"\0tiered-kv audit "


@dataclass(slots=True, eq=False)
class Pair:
    """Two copies of a block: one under its key, pinned, and one in a spare row.

    Attributes:
        audited: The request that they are compared for.
        tier: The tier of the stored copy.
        block: The block under its key.
        spare: The spare row.
        writer: The request whose store fills the spare row; None if a tier's load does.
    """

    audited: Audited
    tier: str
    block: CPUBlock
    spare: CPUBlock
    writer: str | None = None

    @property
    def key(self) -> OffloadKey:
        """The block's key."""
        return self.block.key


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
        self._rows = 0
        self._numbers = itertools.count()

    @property
    def room(self) -> int:
        """Rows that may be taken."""
        return self._rows_max - self._rows

    @property
    def in_flight(self) -> int:
        """Comparisons that have not ended."""
        return len(self._comparing)

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
        The stored copies are in `tier`, by default where the blocks came from.
        """
        self._primary.pin(blocks)
        names = [OffloadKey(_SPARE_KEY + next(self._numbers).to_bytes(8, "big")) for _ in blocks]
        spares = self._primary.allocate(names, PROMOTION, self._primary.chain_of(req_context), evicted)
        if spares is None:
            self._primary.unpin(blocks)
            return []
        self._rows += len(spares)
        audited.pending += len(spares)
        return [
            Pair(audited, tier or block.source or PRIMARY_NAME, block, spare)
            for block, spare in zip(blocks, spares, strict=True)
        ]

    def compare(self, pair: Pair) -> None:
        """Compare two complete copies; `take` returns and releases them."""
        rows = pair.spare.block_id, pair.block.block_id
        stored_row, computed_row = rows if pair.writer is None else reversed(rows)
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
        """Free a spare row that no job uses any more, and unpin its block."""
        self._primary.abandon([pair.spare])
        self._rows -= 1
        self._let_go(pair)

    def expire(self, pair: Pair) -> None:
        """Unpin a block whose spare row a tier may still be writing into."""
        self._primary.forget(pair.spare)
        self._let_go(pair)

    def free(self, pair: Pair) -> None:
        """Free the spare row of an expired load that has ended."""
        self._primary.backend.free(pair.spare)
        self._rows -= 1

    def stop(self, timeout_s: float) -> None:
        """End the comparing thread after its last comparison; wait at most `timeout_s`."""
        running = wait([future for _, future in self._comparing], timeout_s).not_done
        self._thread.shutdown(wait=not running)

    def _difference(self, stored_row: int, computed_row: int) -> float:
        region = self._primary.backend.region  # no array is kept beyond the next line: it would keep the memory mapped
        return difference_of(region.array[stored_row], region.array[computed_row], self._dtype)

    def _let_go(self, pair: Pair) -> None:
        self._primary.unpin([pair.block])
        pair.audited.pending -= 1
