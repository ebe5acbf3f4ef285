"""The index: one dictionary from keys to places.

A place is one integer: a segment's slot above the entry's number in that segment's table. The table's columns
have the other fields of the block. That is at most 150 bytes a block beyond its key: up to 60 for the
dictionary's slot, 32 for the integer, 45 for the columns, which grow by an eighth.

Reading the dictionary needs no lock, on any thread. Changing it needs the pool's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiered_kv.base import OffloadKey

CHUNK_KEYS = 256
PAUSE_S = 50e-6
"""Work on many keys is done in chunks with pauses between, so that the scheduler's thread never waits long for
the interpreter lock."""

_ORDINAL_BITS = 32
_ORDINAL_MASK = (1 << _ORDINAL_BITS) - 1


def take_apart(places: dict[OffloadKey, int]) -> None:
    """Empty an index that is not used any more, in chunks."""
    while places:
        for _ in range(min(CHUNK_KEYS, len(places))):
            places.popitem()
        time.sleep(PAUSE_S)


def place_of(slot: int, ordinal: int) -> int:
    """Return the place of entry `ordinal` of the segment in `slot`."""
    return slot << _ORDINAL_BITS | ordinal


def slot_of(place: int) -> int:
    """Return the slot of the segment that `place` is in."""
    return place >> _ORDINAL_BITS


def ordinal_of(place: int) -> int:
    """Return the number of the entry in its segment's table."""
    return place & _ORDINAL_MASK


class Index:
    """The blocks that can be loaded now."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: dict[OffloadKey, int] = {}
        """Key to place. Replaced by `clear`, so look it up afresh each time."""

    def add(self, keys: Sequence[OffloadKey], first_place: int) -> None:
        """Add blocks with consecutive entries; the place of an existing key changes."""
        self.places.update(zip(keys, range(first_place, first_place + len(keys)), strict=True))

    def move(self, keys: Sequence[OffloadKey], old_places: Sequence[int], first_place: int) -> None:
        """Add blocks that were copied from `old_places`, except those that are not there any more."""
        places = self.places
        for new_place, (key, old_place) in enumerate(zip(keys, old_places, strict=True), first_place):
            if places.get(key) == old_place:
                places[key] = new_place

    def drop(self, key: OffloadKey, place: int) -> bool:
        """Remove a block if it is still at `place`, and return whether it was."""
        if self.places.get(key) != place:
            return False
        del self.places[key]
        return True

    def clear(self) -> dict[OffloadKey, int]:
        """Replace the dictionary by an empty one, and return it: clearing a large one takes long."""
        old, self.places = self.places, {}
        return old
