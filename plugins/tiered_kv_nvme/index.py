"""The index: one dictionary from keys to places.

A place is one integer: a segment's slot in the upper bits, the entry's number (ordinal) in that segment's table in the
lower 32. An index entry takes at most 150 bytes beyond its key: up to 60 for the dictionary's slot, 32 for the
integer, 45 for the table's columns, which grow by an eighth.

Any thread reads the dictionary without a lock. Changes need the pool's lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiered_kv.base import OffloadKey

CHUNK_KEYS = 256
PAUSE_S = 50e-6
"""Work on many keys is done in chunks with pauses, so that the scheduler's thread waits little for the interpreter
lock."""

_ORDINAL_BITS = 32
_ORDINAL_MASK = (1 << _ORDINAL_BITS) - 1


def place_of(slot: int, ordinal: int) -> int:
    return slot << _ORDINAL_BITS | ordinal


def slot_of(place: int) -> int:
    return place >> _ORDINAL_BITS


def ordinal_of(place: int) -> int:
    return place & _ORDINAL_MASK


def clear_in_chunks(places: dict[OffloadKey, int]) -> None:
    while places:
        for _ in range(min(CHUNK_KEYS, len(places))):
            places.popitem()
        time.sleep(PAUSE_S)


class Index:
    """The blocks that can be loaded now."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: dict[OffloadKey, int] = {}
        """`clear` replaces it: do not keep a reference."""

    def add(self, keys: Sequence[OffloadKey], first_place: int) -> None:
        self.places.update(zip(keys, range(first_place, first_place + len(keys)), strict=True))

    def move(self, keys: Sequence[OffloadKey], old_places: Sequence[int], first_place: int) -> None:
        """Change the places of blocks that are still at `old_places`."""
        places = self.places
        for new_place, (key, old_place) in enumerate(zip(keys, old_places, strict=True), first_place):
            if places.get(key) == old_place:
                places[key] = new_place

    def drop(self, key: OffloadKey, place: int) -> bool:
        """Remove a block if it is still at `place`; return whether it was removed."""
        if self.places.get(key) != place:
            return False
        del self.places[key]
        return True

    def clear(self) -> dict[OffloadKey, int]:
        """Replace the dictionary by an empty one, and return the old one, which takes long to clear."""
        old, self.places = self.places, {}
        return old
