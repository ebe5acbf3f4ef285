"""Blocks from before a reset: their keys are forgotten, and their rows become free in later steps.

`PrimaryRows` makes one object, and calls it on the manager's thread. A reset takes as long with a million
rows as with ten: it hands over the index as it is, and `sweep` frees the rows later. A row that is needed sooner is
freed sooner. A row that a transfer uses waits for the transfer's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock

SWEEP_BLOCKS: Final = 512
"""Blocks of one sweep, which takes half a millisecond."""


class RowsOwner(Protocol):
    """Gets the keys of the blocks that the primary tier loses, as `BlockHistory` does."""

    def evicted(self, keys: Collection[OffloadKey]) -> None:
        """Take note of blocks that were evicted."""

    def swept(self, keys: Collection[OffloadKey]) -> None:
        """Take note of blocks from before a reset that a sweep has come to."""


class Orphans:
    """The blocks from before resets.

    A block in use stays until its transfer ends. The call that ends the transfer names only the key, and must find this
    block. Until then its key cannot be stored again. The rows of all other blocks become free when they are swept.

    Args:
        free: Frees the rows of blocks.

    Attributes:
        exist: Whether there are blocks from before a reset; hot paths read it.
        unswept: The indexes that sweeps have not emptied yet, the oldest first.
        owner: Gets the keys that a sweep has taken; optional.
    """

    def __init__(self, free: Callable[[Collection[CPUBlock]], None]) -> None:
        self._free = free
        self._in_use: dict[OffloadKey, CPUBlock] = {}  # swept blocks that a transfer still uses
        self.unswept: deque[dict[OffloadKey, CPUBlock]] = deque()
        self._remains: deque[dict[Any, Any]] = deque()  # dictionaries of policies, which are dropped in parts
        self.exist = False
        self.owner: RowsOwner | None = None

    def __contains__(self, key: OffloadKey) -> bool:
        return self.get(key) is not None

    @property
    def are_in_use(self) -> bool:
        """Whether a transfer uses a block from before a reset."""
        return bool(self._in_use) or any(block.ref_cnt for index in self.unswept for block in index.values())

    def get(self, key: OffloadKey) -> CPUBlock | None:
        """Return the block of this key that a transfer uses; None without one."""
        block = self._in_use.get(key)
        if block is None:
            found = (index.get(key) for index in self.unswept)
            block = next((each for each in found if each is not None and each.ref_cnt), None)
        return block

    def owns(self, block: CPUBlock) -> bool:
        """Return whether a block is from before a reset."""
        key = block.key
        return self._in_use.get(key) is block or any(index.get(key) is block for index in self.unswept)

    def add(self, index: dict[OffloadKey, CPUBlock], remains: dict[Any, Any]) -> None:
        """Take over the index of a primary tier at a reset, and its policy's dictionary; nobody else uses them."""
        if index:
            self.unswept.append(index)
            self.exist = True
        if remains:
            self._remains.append(remains)

    def remove(self, block: CPUBlock) -> bool:
        """Remove a block, which the caller then frees; return whether it was here."""
        for index in (self._in_use, *self.unswept):
            if index.get(block.key) is block:
                del index[block.key]
                self._note()
                return True
        return False

    def sweep(self, count: int = SWEEP_BLOCKS) -> int:
        """Take the next `count` blocks, and free those that are unused; return how many rows became free."""
        freed = 0
        while count > 0 and self.unswept:
            index = self.unswept[0]
            swept = [index.popitem() for _ in range(min(count, len(index)))]
            count -= len(swept)
            if not index:
                self.unswept.popleft()
            self._drop(len(swept))
            self._in_use.update(each for each in swept if each[1].ref_cnt)
            unused = [block for _, block in swept if not block.ref_cnt]
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
        """Drop the policies' dictionaries in parts: dropping all at once takes 20 ms for a million blocks."""
        while count > 0 and self._remains:
            if self._remains[0]:
                count -= 1 + len(self._remains[0].popitem()[1])
            else:
                self._remains.popleft()
        if not self.unswept:
            self._remains.clear()

    def _note(self) -> None:
        self.exist = bool(self._in_use or self.unswept)
