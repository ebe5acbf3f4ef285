"""How much of prompts the engine loaded rather than computed."""

from __future__ import annotations

from collections.abc import Collection
from operator import itemgetter

from tiered_kv.base import OffloadKey

_GROUP_BYTES = 4
_group_of = itemgetter(slice(-_GROUP_BYTES, None))


class RestoredBlocks:
    """Blocks that the engine loaded, of the KV cache group of which it loaded most.

    An engine loads a token once for each of its groups, so one group tells how many tokens it restored. The manager's
    thread adds, any thread may read.
    """

    __slots__ = ("_by_group",)

    def __init__(self) -> None:
        self._by_group: dict[bytes, int] = {}

    @property
    def count(self) -> int:
        """Blocks so far."""
        return max(list(self._by_group.values()), default=0)

    def add(self, keys: Collection[OffloadKey]) -> None:
        """Count a batch; one whose first and last key are of one group is taken to be of that group."""
        if not keys:
            return
        ordered = keys if isinstance(keys, (list, tuple)) else list(keys)
        by_group, first = self._by_group, _group_of(ordered[0])
        if first == _group_of(ordered[-1]):
            by_group[first] = by_group.get(first, 0) + len(ordered)
            return
        for group in map(_group_of, ordered):
            by_group[group] = by_group.get(group, 0) + 1
