"""A map from keys to numbers that takes little memory, and never pauses for long: for indexes of millions of blocks.

A tier that keeps an index in memory has one from key to place, as nvme does. One thread writes at a time. Any thread
may read meanwhile, without a lock: it finds a key that is in the table from before its call until after it. A key is
compared whole, so a number is never that of another key.

A dictionary takes two or three objects a key, 150 to 200 B, and moves all its entries at once when it grows. Here the
keys are divided by their hash into `SHARDS`, each of two arrays: a tag of one byte for each slot, and a record for
each slot, the key and its number. A key lies in one of the `WINDOW` slots from that of its hash on. So one call finds
its tag, and a second compares the key: two or three lines of the processor's cache, a dictionary has four. A key takes
60 to 75 B. Buckets of `bytes` were measured beside it. They are as fast in the cache; a miss among millions took 1.2
to 2 times as long, and every opening made an object for each bucket.

Why a reader is safe: each access to an array is one call in C. A record never moves within an array. A new record is
written before its tag, and the tag of a deleted one is cleared before its slot is used again. A shard grows as a new
pair of arrays, which replaces the old pair at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cpu.key_hashes import Hashes, key_hash, key_hashes
from tiered_kv.cpu.key_shards import (
    SHARD_MASK,
    SHARDS,
    TAGS,
    WINDOW,
    Shard,
    places_of,
    rows_in_order,
    shard_number,
    shard_of,
    tags_of,
)
from tiered_kv.system.threads import run_all

_SLOTS_MIN: Final = 48
_LOAD_MAX: Final = 0.8  # of the slots. With more, some windows are full.
_LOAD_MIN: Final = 0.7  # a shard with less does not grow if a window is full: the key goes into the dictionary
_SLOTS_A_KEY: Final = 1.5  # of a shard that has grown
_SLOTS_A_KEY_SMALL: Final = 1.75
_SMALL: Final = 1 << 10  # keys of a shard that grows in larger steps
_SPREAD: Final = 0.3
"""By up to this share shards differ in size, so that they do not all grow at about the same time."""
_SLOTS_A_KEY_BUILT: Final = 1.35

_NO_SHARD: Final = shard_of(0, 0)


class KeyTable:
    """Numbers by key; see the module.

    Keys of another length than the first one's are in a dictionary: their records would have another size. An engine's
    keys have one length.

    Args:
        number_bytes: The size of a number, which is from 0 up: 4 or 8 bytes.
    """

    __slots__ = ("_count", "_crowded", "_key_bytes", "_number_bytes", "_others", "_record", "_rooms", "_shards")

    def __init__(self, number_bytes: int = 8) -> None:
        self._number_bytes = number_bytes
        self._key_bytes = -1  # the length of the keys in shards; -1 before the first key
        self._record = Struct("")
        self._shards: list[Shard] = [_NO_SHARD] * SHARDS
        self._rooms = [0] * SHARDS  # how many keys each shard takes before it grows
        self._count = 0  # keys in shards
        self._others: dict[bytes, int] = {}
        """Keys of other lengths, and those of full windows."""
        self._crowded: dict[int, bytes] = {}
        """Those of full windows, by number."""

    @classmethod
    def build(
        cls,
        keys: NDArray[np.uint8],
        numbers: NDArray[np.unsignedinteger],
        number_bytes: int = 8,
        hashes: Hashes | None = None,
        threads: int = 1,
    ) -> KeyTable:
        """Return a table of many keys, in some 0.1 µs a key. Of equal keys the last one counts.

        Args:
            keys: The keys, one a row, of shape (n, key bytes).
            numbers: Their numbers, of shape (n,).
            number_bytes: The size of a number.
            hashes: `key_hashes` of the keys, if the caller has them.
            threads: How many threads work on it, this one included.
        """
        table = cls(number_bytes)
        count, key_bytes = keys.shape
        if not count or not key_bytes:
            table.set_many([key.tobytes() for key in keys], numbers.tolist())
            return table
        table._use_length(key_bytes)
        hashes = key_hashes(keys) if hashes is None else hashes
        sizes = (_SLOTS_A_KEY_BUILT * np.bincount(shard_number(hashes), minlength=SHARDS)).astype(np.int64)
        shards = [shard_of(max(_SLOTS_MIN, size), table._record.size) for size in sizes.tolist()]
        ends = np.cumsum([len(tags) for tags, _, _ in shards])
        starts = ends - [len(tags) for tags, _, _ in shards]
        slots = np.array([each[2] for each in shards], np.uint32)
        order, homes = rows_in_order(keys, hashes, starts, slots, threads)
        places = places_of(homes)
        bounds = np.searchsorted(homes, [*starts, ends[-1]]).tolist()
        whole_keys = np.ascontiguousarray(keys).view(f"V{key_bytes}").reshape(count)

        def fill(index: int) -> None:
            own, start = slice(bounds[index], bounds[index + 1]), int(starts[index])
            rows = order[own]
            records = np.empty(len(rows), table._columns)
            records["key"], records["number"] = whole_keys.take(rows), numbers.take(rows)
            homes_in, places_in = homes[own] - start, places[own] - start
            table._put(index, shards[index], records.view(table._whole), hashes.take(rows), homes_in, places_in)

        for filled in run_all(fill, range(SHARDS), "tiered-kv-index", threads):
            filled.result()
        table._count = len(order) - len(table._others)
        return table

    @classmethod
    def of_shards(cls, key_bytes: int, shards: Sequence[Shard], number_bytes: int = 8) -> KeyTable:
        """Return a table from all the `shards` of another one. Those `crowded` there are set afterwards."""
        table = cls(number_bytes)
        table._use_length(key_bytes)
        assert len(shards) == SHARDS
        for index, shard in enumerate(shards):
            used = len(shard[0]) - shard[0].count(0)
            table._shards[index], table._rooms[index] = shard, int(_LOAD_MAX * len(shard[0])) - used
            table._count += used
        return table

    @property
    def shards(self) -> Sequence[Shard]:
        """All shards. While they are read, nobody changes the table."""
        return self._shards

    @property
    def crowded(self) -> Sequence[tuple[bytes, int]] | None:
        """The keys of full windows, with their numbers; None if the table has no key in a shard, or another length."""
        if not self._count or len(self._others) > len(self._crowded):
            return None
        return [(key, number) for number, key in self._crowded.items()]

    @property
    def key_bytes(self) -> int:
        """The length of the keys in shards; -1 before the first key."""
        return self._key_bytes

    def __len__(self) -> int:
        return self._count + len(self._others)

    def __contains__(self, key: bytes) -> bool:  # `get`, without the number
        if len(key) == self._key_bytes:
            hash_ = key_hash(key)
            tags, records, slots = self._shards[hash_ & SHARD_MASK]
            home, tag = hash_ % slots, hash_ % TAGS + 1
            at = tags.find(tag, home, home + WINDOW)
            while at >= 0:
                if records.startswith(key, at * self._record.size):
                    return True
                at = tags.find(tag, at + 1, home + WINDOW)
        return bool(self._others) and key in self._others

    def get(self, key: bytes) -> int:
        """Return the number of `key`; -1 if it has none. Any thread."""
        if len(key) == self._key_bytes:
            hash_ = key_hash(key)
            tags, records, slots = self._shards[hash_ & SHARD_MASK]
            home, tag = hash_ % slots, hash_ % TAGS + 1
            at = tags.find(tag, home, home + WINDOW)
            while at >= 0:
                found, number = self._record.unpack_from(records, at * self._record.size)
                if found == key:
                    return int(number)
                at = tags.find(tag, at + 1, home + WINDOW)
        return self._others.get(key, -1) if self._others else -1

    def get_many(self, keys: Collection[bytes]) -> list[int]:
        """Return the number of each key; -1 if it has none. Any thread."""
        shards, key_bytes, unpack, size = self._shards, self._key_bytes, self._record.unpack_from, self._record.size
        numbers = list[int]()
        for key, hash_ in zip(keys, map(key_hash, keys), strict=True):  # `get`, without its call
            if len(key) == key_bytes:
                tags, records, slots = shards[hash_ & SHARD_MASK]
                home = hash_ % slots
                at = tags.find(hash_ % TAGS + 1, home, home + WINDOW)
                if at >= 0:
                    found, number = unpack(records, at * size)
                    if found == key:
                        numbers.append(number)
                        continue
                elif not self._others:
                    numbers.append(-1)
                    continue
            numbers.append(self.get(key))
        return numbers

    def set(self, key: bytes, number: int) -> None:
        """Give `key` a number, in place of one that it has. The writer's thread."""
        self.set_many((key,), (number,))

    def set_many(self, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Give each key a number, in place of one that it has. The writer's thread."""
        if self._key_bytes < 0 and keys and keys[0]:
            self._use_length(len(keys[0]))
        shards, rooms, others, key_bytes = self._shards, self._rooms, self._others, self._key_bytes
        pack, size, window = self._record.pack_into, self._record.size, WINDOW
        added = 0
        for key, number, hash_ in zip(keys, numbers, map(key_hash, keys), strict=True):
            if len(key) != key_bytes or (others and key in others):
                self._set_other(key, number)
                continue
            index = hash_ & SHARD_MASK
            tags, records, slots = shards[index]
            home, tag = hash_ % slots, hash_ % TAGS + 1
            end = home + window
            at = tags.find(tag, home, end)
            while at >= 0 and not records.startswith(key, at * size):
                at = tags.find(tag, at + 1, end)
            if at >= 0:
                pack(records, at * size, key, number)
            elif rooms[index] and (at := tags.find(0, home, end)) >= 0:
                pack(records, at * size, key, number)
                tags[at] = tag
                rooms[index] -= 1
                added += 1
            else:
                added += self._set_crowded(key, number, hash_)
        self._count += added

    def pop(self, key: bytes) -> int:
        """Remove `key` and return its number; -1 if it has none. The writer's thread."""
        if len(key) == self._key_bytes:
            hash_ = key_hash(key)
            tags, records, slots = self._shards[hash_ & SHARD_MASK]
            home, tag = hash_ % slots, hash_ % TAGS + 1
            at = tags.find(tag, home, home + WINDOW)
            while at >= 0:
                found, number = self._record.unpack_from(records, at * self._record.size)
                if found == key:
                    tags[at] = 0
                    self._rooms[hash_ & SHARD_MASK] += 1
                    self._count -= 1
                    return int(number)
                at = tags.find(tag, at + 1, home + WINDOW)
        number = self._others.pop(key, -1)
        if self._crowded.get(number) == key:
            del self._crowded[number]
        return int(number)

    def find_numbers(self, hashes: Iterable[int], numbers: Sequence[int]) -> list[bytes | None]:
        """Return the keys that have some numbers; None where no key of length `key_bytes` has one. Any thread.

        No two keys may have one number. `hashes` are the `key_hashes` of the wanted keys.
        """
        return self._with_numbers(hashes, numbers, removes=False)

    def pop_numbers(self, hashes: Iterable[int], numbers: Sequence[int]) -> list[bytes | None]:
        """Remove and return the keys that have some numbers; see `find_numbers`. The writer's thread."""
        return self._with_numbers(hashes, numbers, removes=True)

    def release(self) -> bool:
        """Give back the memory of a shard of a table that nobody uses; return whether any is left.

        The memory of a whole table, given back at once, takes milliseconds.
        """
        del self._shards[-1]
        return bool(self._shards)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over keys and numbers. Any thread; changes that are made meanwhile may be seen or not."""
        unpack, size = self._record.unpack_from, self._record.size
        for tags, records, _ in list(self._shards):
            for at in np.flatnonzero(np.frombuffer(tags, np.uint8)).tolist():
                if tags[at]:
                    yield unpack(records, at * size)
        yield from list(self._others.items())

    def _with_numbers(self, hashes: Iterable[int], numbers: Sequence[int], *, removes: bool) -> list[bytes | None]:
        shards, rooms, unpack, size = self._shards, self._rooms, self._record.unpack_from, self._record.size
        keys, removed = list[bytes | None](), 0
        for hash_, wanted in zip(hashes, numbers, strict=True):
            tags, records, slots = shards[hash_ & SHARD_MASK]
            home, tag = hash_ % slots, hash_ % TAGS + 1
            at = tags.find(tag, home, home + WINDOW)
            while at >= 0:
                key, number = unpack(records, at * size)
                if number == wanted:
                    keys.append(key)
                    if removes:
                        tags[at] = 0
                        rooms[hash_ & SHARD_MASK] += 1
                        removed += 1
                    break
                at = tags.find(tag, at + 1, home + WINDOW)
            else:
                keys.append(self._crowded.get(wanted) if self._crowded else None)
                if removes and (key := keys[-1]) is not None:
                    del self._crowded[wanted], self._others[key]
        self._count -= removed
        return keys

    def _use_length(self, key_bytes: int) -> None:
        self._record = Struct(f"={key_bytes}s{'I' if self._number_bytes == 4 else 'Q'}")
        self._key_bytes = key_bytes

    @property
    def _columns(self) -> np.dtype[np.void]:
        return np.dtype([("key", f"V{self._key_bytes}"), ("number", f"=u{self._number_bytes}")])

    @property
    def _whole(self) -> np.dtype[np.void]:
        """A record as one item, which numpy moves faster than one of two columns."""
        return np.dtype(f"V{self._record.size}")

    def _set_other(self, key: bytes, number: int) -> None:
        if len(key) == self._key_bytes:
            old = self._others.get(key, -1)
            if self._crowded.get(old) == key:
                del self._crowded[old]
            self._crowded[number] = key
        self._others[key] = number

    def _set_crowded(self, key: bytes, number: int, hash_: int) -> bool:
        """Add a key whose shard or window is full; return whether it is in a shard now."""
        index = hash_ & SHARD_MASK
        tags = self._shards[index][0]
        if len(tags) - tags.count(0) >= int(_LOAD_MIN * len(tags)):
            self._grow(index)
        tags, records, slots = self._shards[index]
        home = hash_ % slots
        at = tags.find(0, home, home + WINDOW)
        if at < 0:
            self._set_other(key, number)
            return False
        self._record.pack_into(records, at * self._record.size, key, number)
        tags[at] = hash_ % TAGS + 1
        self._rooms[index] -= 1
        return True

    def _grow(self, index: int) -> None:
        """Replace a shard by a larger one."""
        tags, content, _ = self._shards[index]
        larger = 1 + _SPREAD * (index * 5 % 16) / 16
        if not tags:
            shard = shard_of(int(_SLOTS_MIN * larger), self._record.size)
            self._rooms[index], self._shards[index] = int(_LOAD_MAX * len(shard[0])), shard
            return
        records = np.frombuffer(content, self._whole)[np.flatnonzero(np.frombuffer(tags, np.uint8))]
        count = len(records)
        keys = records.view(np.uint8).reshape(count, self._record.size)[:, : self._key_bytes]
        hashes = key_hashes(keys)
        slots_a_key = _SLOTS_A_KEY_SMALL if count < _SMALL else _SLOTS_A_KEY
        shard = shard_of(int(max(_SLOTS_MIN, slots_a_key * count) * larger), self._record.size)
        homes = hashes % np.uint32(shard[2])
        order = np.argsort(homes.astype(np.uint16) if shard[2] < 1 << 16 else homes, kind="stable")
        in_order: NDArray[np.int64] = homes[order].astype(np.int64)
        self._count -= len(self._put(index, shard, records[order], hashes[order], in_order, places_of(in_order)))

    def _put(
        self,
        index: int,
        shard: Shard,
        records: NDArray[np.void],
        hashes: Hashes,
        homes: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> list[bytes]:
        """Fill a shard with records, and let readers see it; return the keys for which a window has no room."""
        tags, content, _ = shard
        crowded: list[bytes] = []
        fits = places < np.minimum(homes + WINDOW, len(tags))
        if not fits.all():
            for key, number in map(self._record.unpack, map(bytes, records[~fits])):
                self._set_other(key, number)  # before the shard is replaced: a reader finds it here or there
                crowded.append(key)
            records, hashes, places = records[fits], hashes[fits], places[fits]
        np.frombuffer(content, self._whole)[places] = records
        np.frombuffer(tags, np.uint8)[places] = tags_of(hashes)
        self._rooms[index] = max(0, int(_LOAD_MAX * len(tags)) - len(records))
        self._shards[index] = shard
        return crowded
