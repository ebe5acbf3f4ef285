"""The index of a directory: which blocks can be loaded, and from where.

`SegmentPool` has one. Threads change it under the pool's lock; any thread reads it without. It names a block only after
the block's bytes have been written.

A place is one integer: a segment's slot in the upper bits, the entry's number (ordinal) in that segment's table in the
lower 32. The index is a `KeyTable` from keys to places. With a key of 36 bytes, a block takes some 110 bytes: 60 to 70
here, 40 in the segment's table. No block is an object that the garbage collector walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.key_hashes import key_hashes
from tiered_kv.cpu.key_table import KeyTable
from tiered_kv_nvme.layout import Hashes
from tiered_kv_nvme.segment import Segment

ANSWERS_MAX: Final = 1 << 14  # answers that `Answers` keeps
_ORDINAL_BITS = 32
_ORDINAL_MASK = (1 << _ORDINAL_BITS) - 1


def place_of(slot: int, ordinal: int) -> int:
    return slot << _ORDINAL_BITS | ordinal


def slot_of(place: int) -> int:
    return place >> _ORDINAL_BITS


def ordinal_of(place: int) -> int:
    return place & _ORDINAL_MASK


class Answers(dict[OffloadKey, bool]):
    """Whether the index has a block, kept from the first question until the block is added or removed.

    An engine asks for its waiting requests in each step, and a dictionary answers faster than the table. Only the
    scheduler's thread asks, without a lock. So it may keep an answer that a worker has just made wrong: then `changes`
    tells it to forget that one.
    """

    __slots__ = ("_places", "changes")

    def __init__(self, places: KeyTable) -> None:
        self._places = places
        self.changes = 0
        """How often `forget` was called, after changes of the index."""

    def __missing__(self, key: OffloadKey) -> bool:
        if len(self) >= ANSWERS_MAX:
            self.clear()
        changes = self.changes
        answer = self[key] = key in self._places
        if self.changes != changes:
            self.pop(key, None)
        return answer

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Locked. Forget the answers for blocks that have been added or removed."""
        self.changes += 1  # first: an answer that is kept from now on is looked at again
        for key in keys:
            self.pop(key, None)


class BlockIndex:
    """Places by key. The caller of a method whose docstring begins with "Locked" holds the pool's lock."""

    def __init__(self) -> None:
        self.use(KeyTable())

    def use(self, places: KeyTable) -> None:
        """Locked. Replace the table."""
        self.places = places  # `clear` replaces it: do not keep a reference
        self.answers = Answers(places)

    def add(self, keys: Sequence[OffloadKey], first_place: int) -> None:
        """Locked. Enter a batch's blocks; their places follow from `first_place`."""
        self.places.set_many(keys, range(first_place, first_place + len(keys)))
        self.answers.forget(keys)

    def move(self, keys: Sequence[OffloadKey], first_place: int, old_places: Sequence[int]) -> None:
        """Locked. Enter the new places of those blocks that are still at their old ones."""
        for place, (key, old_place) in enumerate(zip(keys, old_places, strict=True), first_place):
            if self.places.get(key) == old_place:
                self.places.set(key, place)

    def drop(self, key: OffloadKey, place: int) -> bool:
        """Locked. Remove a block if it is still at `place`; return whether it was removed."""
        if self.places.get(key) != place:
            return False
        self.places.pop(key)
        self.answers.forget((key,))
        return True

    def evict(self, segment: Segment, ordinals: range) -> tuple[list[int], list[OffloadKey]]:
        """Locked. Remove those of a segment's blocks that are still there; return their ordinals and keys."""
        table, first = segment.table, place_of(segment.slot, ordinals.start)
        if table.hashes is None:
            keys = zip(ordinals, table.keys(ordinals), strict=True)
            found = [(at, key) for at, key in keys if self.drop(key, place_of(segment.slot, at))]
        else:
            hashes = table.hashes[ordinals.start : ordinals.stop].tolist()
            popped = self.places.pop_numbers(hashes, range(first, first + len(ordinals)))
            gone = [OffloadKey(key) for key in popped if key is not None]
            self.answers.forget(gone)
            if len(gone) == len(ordinals):
                return list(ordinals), gone
            found = [(at, OffloadKey(key)) for at, key in zip(ordinals, popped, strict=True) if key is not None]
        return [at for at, _ in found], [key for _, key in found]

    def keys_of(self, segment: Segment, ordinals: Sequence[int]) -> list[OffloadKey | None]:
        """Return the keys of a segment's blocks; None for a block that is not in the index, or is elsewhere.

        The reclaimer's thread, which forgets the keys of segments, without a lock.
        """
        table, places = segment.table, [place_of(segment.slot, at) for at in ordinals]
        if table.hashes is not None:
            found = self.places.find_numbers(table.hashes[ordinals].tolist(), places)
            return [None if key is None else OffloadKey(key) for key in found]
        keys = table.keys(ordinals)
        here = zip(keys, self.places.get_many(keys), places, strict=True)
        return [key if found == place else None for key, found, place in here]

    def hashes_of(self, segment: Segment) -> Hashes | None:
        """Return the hashes by which the keys of a segment's blocks can be found; None if they cannot."""
        rows = segment.table.key_rows
        return None if rows is None or rows.shape[1] != self.places.key_bytes else key_hashes(rows)

    def clear(self) -> KeyTable:
        """Locked. Begin an empty index, and return the old table, which takes long to give back."""
        old = self.places
        self.use(KeyTable())
        return old
