"""The rows of the primary tier by key: many small dictionaries, so that none of them pauses the engine.

`PrimaryRows` writes it, on the scheduler's thread; any thread may read a key. What must stay true: a key is in one
dictionary at most, which its bytes alone decide.

One dictionary of a million keys moves all of them at once when it grows or has had many deletions, which takes 0.2 s.
With 256, each moves few. `KeyTable` takes half the memory, but its lookups take several times as long as a
dictionary's: docs/explanation/decisions.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.row_table import unwatched

SHARDS: Final = 256
"""One for each value of a byte."""
SHARD_BYTE: Final = -5
"""The byte of a key that decides: the last one of the block's hash, before the four of the KV cache group."""


class KeyIndex:
    """The row of each key.

    Attributes:
        shards: A dictionary for each value of the byte `SHARD_BYTE`. The list stays the same one, also after a reset.
            Hot paths read it. Shorter keys are in the first dictionary: there the byte is an IndexError.
    """

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[OffloadKey, int]] = [unwatched({}) for _ in range(SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def get(self, key: OffloadKey) -> int | None:
        """Return the row of a key; None if it has none. Any thread."""
        try:
            return self.shards[key[SHARD_BYTE]].get(key)
        except IndexError:
            return self.shards[0].get(key)

    def get_many(self, keys: Iterable[OffloadKey]) -> list[int | None]:
        """Return the row of each key."""
        shards = self.shards
        try:
            return [shards[key[SHARD_BYTE]].get(key) for key in keys]
        except IndexError:
            return list(map(self.get, keys))

    def add(self, keys: Iterable[OffloadKey], rows: Iterable[int]) -> None:
        """Give each key a row."""
        shards = self.shards
        for key, row in zip(keys, rows, strict=True):
            try:
                shards[key[SHARD_BYTE]][key] = row
            except IndexError:
                shards[0][key] = row

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys that have a row."""
        shards = self.shards
        for key in keys:
            try:
                shard = shards[key[SHARD_BYTE]]
            except IndexError:
                shard = shards[0]
            del shard[key]

    def items(self) -> Iterator[tuple[OffloadKey, int]]:
        """Yield all keys and rows; nothing may be added or removed meanwhile."""
        for shard in self.shards:
            yield from shard.items()

    def take_all(self) -> KeyIndex:
        """Return another index with all keys and rows, and have none from now on."""
        taken = KeyIndex()
        taken.shards, self.shards[:] = self.shards.copy(), taken.shards
        return taken

    def take(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Remove and return up to `count` keys with their rows; fewer if no others are left."""
        taken: list[tuple[OffloadKey, int]] = []
        for shard in self.shards:
            if shard:
                taken += [shard.popitem() for _ in range(min(count - len(taken), len(shard)))]
                if len(taken) == count:
                    break
        return taken
