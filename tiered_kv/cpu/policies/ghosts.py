"""Ghosts: which blocks were evicted last, in their order.

`ARCPolicy` owns them, on the scheduler's thread. What must stay true: a block that comes back is no ghost any more, and
the oldest ghost goes first. Two keys of one 64-bit hash count as one: that costs hits at most.

A dictionary in order would keep the key of each ghost, and pause the engine when a million are moved. Here a queue has
the hashes in order, and small sets tell which of them still count.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from tiered_kv.base import OffloadKey

_SHARDS: Final = 256
_SPARE: Final = 64
"""How many entries of the queue may not count, besides one for each ghost."""


class Ghosts:
    """Hashes of keys, the oldest first."""

    def __init__(self) -> None:
        self._shards: list[set[int]] = [set() for _ in range(_SHARDS)]
        self._queue: deque[int] = deque()
        self._gone: dict[int, int] = {}
        """How many entries of the queue do not count any more, by hash. They are its oldest entries."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, key: OffloadKey) -> None:
        """Add a key that is no ghost, as the youngest."""
        hashed = hash(key)
        shard = self._shards[hashed % _SHARDS]
        if hashed not in shard:
            shard.add(hashed)
            self._queue.append(hashed)
            self._size += 1

    def discard(self, key: OffloadKey) -> bool:
        """Remove a key, and return whether it was a ghost."""
        hashed = hash(key)
        shard = self._shards[hashed % _SHARDS]
        if hashed not in shard:
            return False
        shard.remove(hashed)
        self._size -= 1
        self._gone[hashed] = self._gone.get(hashed, 0) + 1
        if len(self._queue) > 2 * self._size + _SPARE:
            counts = [each for each in self._queue if not self._is_gone(each)]
            self._queue = deque(counts)
        return True

    def pop(self) -> None:
        """Remove the oldest ghost."""
        while self._is_gone(hashed := self._queue.popleft()):
            pass
        self._shards[hashed % _SHARDS].remove(hashed)
        self._size -= 1

    def _is_gone(self, hashed: int) -> bool:
        """Return whether the oldest entry of this hash does not count; if so, the caller removes the entry."""
        count = self._gone.pop(hashed, 0)
        if count > 1:
            self._gone[hashed] = count - 1
        return count > 0
