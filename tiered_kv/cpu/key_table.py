"""A map from keys to numbers that takes little memory, and never pauses: for indexes of millions of blocks.

A tier that keeps an index in memory has one from key to place, as nvme does. One thread writes at a time. Any thread
may read meanwhile, without a lock: it finds a key that is in the table from before its call until after it. A key is
compared whole, so a number is never that of another key.

A dictionary needs two or three objects a key, takes 150 to 200 B, and moves all its entries at once when it grows or
has had many deletions (0.14 s for a million). Here a key and its number are a record in one of many buckets. A bucket
is a `bytes` object of some eight records, and `bytes.find` searches it. A change replaces the bucket, so a reader sees
the old one or the new one. The buckets grow by linear hashing (W. Litwin, "Linear hashing: a new tool for file and
table addressing", VLDB 1980): each time one bucket is split, and no other key moves. A key takes some 60 B.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_kv.cpu.key_hashes import bucket_indexes, key_hashes, mask_of
from tiered_kv.system.heap import untracked
from tiered_kv.system.threads import run_all

_RECORDS = 8
"""Mean number of records in a bucket: fewer take more memory, more take more time."""
_RECORDS_MAX = 64
"""Limit of a bucket, which random keys do not reach; further keys go into the dictionary."""
_CHUNK = 1 << 16
"""How many keys or buckets `build` works on at a time, so that they fit into the processor's cache."""
_NUMBERS: Final = {4: Struct("=I"), 8: Struct("=Q")}


class TablePart(NamedTuple):
    """Some buckets, one after another, for a file."""

    sizes: bytes  # the number of records of each bucket, one byte each
    records: bytes  # each a key, and its number as the machine has it

    def buckets(self, record_bytes: int) -> list[bytes]:
        ends = np.cumsum(np.frombuffer(self.sizes, np.uint8), dtype=np.int64) * record_bytes
        records = self.records
        return [records[start:end] for start, end in pairwise([0, *ends.tolist()])]


class KeyTable:
    """Numbers by key; see the module.

    Keys of another length than the first one's are in a dictionary: their records would have another size. An engine's
    keys have one length.

    Args:
        number_bytes: The size of a number, which is from 0 up: 4 or 8 bytes.
    """

    __slots__ = ("_buckets", "_count", "_crowded", "_key_bytes", "_mask", "_number", "_others", "_record_bytes")

    def __init__(self, number_bytes: int = 8) -> None:
        self._number = _NUMBERS[number_bytes]
        self._key_bytes = -1  # the length of the keys in buckets; -1 before the first key
        self._record_bytes = 0
        self._buckets: list[bytes] = untracked([b""])
        self._mask = 0
        """2**k - 1, where more than 2**(k - 1) and at most 2**k buckets exist. See `_index`."""
        self._count = 0  # keys in buckets
        self._others: dict[bytes, int] = {}
        """Keys of other lengths, and those of full buckets."""
        self._crowded: dict[int, bytes] = {}
        """Those of full buckets, by number."""

    @classmethod
    def build(
        cls,
        keys: NDArray[np.uint8],
        numbers: NDArray[np.unsignedinteger],
        number_bytes: int = 8,
        hashes: NDArray[np.uint32] | None = None,
        threads: int = 1,
    ) -> KeyTable:
        """Return a table of many keys, in some 0.2 µs a key. Of equal keys the last one counts.

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
            table.set_many([bytes(key) for key in keys], numbers.tolist())
            return table
        table._use_length(key_bytes)
        bucket_count = -(-count // _RECORDS)
        table._mask = mask = mask_of(bucket_count)
        hashes = key_hashes(keys) if hashes is None else hashes
        order, indexes = _ordered(keys, hashes, bucket_count, mask, threads)
        ends = np.searchsorted(indexes, np.arange(bucket_count + 1, dtype=np.uint32)) * table._record_bytes
        record = np.dtype([("key", f"V{key_bytes}"), ("number", f"=u{number_bytes}")])
        whole_keys = np.ascontiguousarray(keys).view(record["key"]).reshape(count)

        def buckets_from(first: int) -> list[bytes]:
            bounds = ends[first : first + _CHUNK + 1]
            part = order[bounds[0] // record.itemsize : bounds[-1] // record.itemsize]
            records = np.empty(len(part), record)
            records["key"], records["number"] = whole_keys.take(part), numbers.take(part)
            content = records.tobytes()
            return [content[start:end] for start, end in pairwise((bounds - bounds[0]).tolist())]

        parts = run_all(buckets_from, range(0, bucket_count, _CHUNK), "tiered-kv-index", threads)
        table._buckets = untracked([bucket for part in parts for bucket in part.result()])
        table._count = len(order)
        for index in np.flatnonzero(np.diff(ends) > _RECORDS_MAX * record.itemsize).tolist():
            table._spill(index)
        return table

    @classmethod
    def of_buckets(cls, key_bytes: int, buckets: list[bytes], count: int, number_bytes: int = 8) -> KeyTable:
        """Return a table of `count` keys, from the buckets of all its `parts`."""
        table = cls(number_bytes)
        table._use_length(key_bytes)
        table._buckets, table._count = untracked(buckets), count
        table._mask = mask_of(len(buckets))
        return table

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    def part_count(self, bucket_count: int) -> int:
        """Return how many `parts` there are; 0 if some keys are in no bucket, or if there are none."""
        return 0 if self._others or not self._count else -(-len(self._buckets) // bucket_count)

    def parts(self, bucket_count: int) -> Iterator[TablePart]:
        """Iterate over a table that nobody changes, some buckets at a time."""
        for first in range(0, len(self._buckets), bucket_count):
            buckets = self._buckets[first : first + bucket_count]
            sizes = np.fromiter(map(len, buckets), np.uint32, len(buckets)) // self._record_bytes
            yield TablePart(sizes.astype(np.uint8).tobytes(), b"".join(buckets))

    @property
    def key_bytes(self) -> int:
        """The length of the keys in buckets; -1 before the first key."""
        return self._key_bytes

    def __len__(self) -> int:
        return self._count + len(self._others)

    def __contains__(self, key: bytes) -> bool:  # `get`, without its call
        if len(key) == self._key_bytes:
            buckets = self._buckets
            count, mask = len(buckets), self._mask
            index = zlib.crc32(key) & mask
            at = buckets[index if index < count else index & (mask >> 1)].find(key)
            if at >= 0 and not at % self._record_bytes:
                return True
            if at < 0 and len(buckets) == count and not self._others:
                return False
        return self.get(key) >= 0

    def get(self, key: bytes) -> int:
        """Return the number of `key`; -1 if it has none. Any thread."""
        key_bytes = self._key_bytes
        if len(key) == key_bytes:
            buckets = self._buckets
            count, mask = len(buckets), self._mask  # in this order: see `_split`
            index = zlib.crc32(key) & mask
            bucket = buckets[index if index < count else index & (mask >> 1)]
            at = bucket.find(key)
            if at >= 0:
                if at % self._record_bytes:
                    at = self._find(bucket, key, at)
                if at >= 0:
                    number: int = self._number.unpack_from(bucket, at + key_bytes)[0]
                    return number
            if len(buckets) != count:  # the key may have moved to a new bucket meanwhile
                return self.get(key)
        return self._others.get(key, -1) if self._others else -1

    def get_many(self, keys: Collection[bytes]) -> list[int]:
        """Return the number of each key; -1 if it has none. Any thread."""
        buckets, key_bytes, size, unpack = self._buckets, self._key_bytes, self._record_bytes, self._number.unpack_from
        numbers = list[int]()
        for key, index in zip(keys, map(zlib.crc32, keys), strict=True):  # `get`, without its call
            if len(key) == key_bytes:
                count, mask = len(buckets), self._mask
                index &= mask
                bucket = buckets[index if index < count else index & (mask >> 1)]
                at = bucket.find(key)
                if at >= 0 and not at % size:
                    numbers.append(unpack(bucket, at + key_bytes)[0])
                    continue
                if at < 0 and len(buckets) == count and not self._others:
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
        key_bytes, size, pack, others = self._key_bytes, self._record_bytes, self._number.pack, self._others
        buckets, limit = self._buckets, _RECORDS_MAX * self._record_bytes
        mask, count = self._mask, len(buckets)
        room = _RECORDS * count - self._count  # for keys until the next split
        for key, number, encoded, index in zip(keys, numbers, map(pack, numbers), map(zlib.crc32, keys), strict=True):
            if len(key) != key_bytes or (others and key in others):
                self._set_other(key, number)
                continue
            index &= mask
            if index >= count:
                index &= mask >> 1
            bucket = buckets[index]
            at = bucket.find(key)
            if at > 0 and at % size:
                at = self._find(bucket, key, at)
            if at >= 0:
                buckets[index] = b"".join((bucket[: at + key_bytes], encoded, bucket[at + size :]))
            elif len(bucket) < limit:
                buckets[index] = bucket + (key + encoded)
                room -= 1
                if room < 0:
                    self._split()
                    mask, count, room = self._mask, count + 1, room + _RECORDS
            else:
                self._set_other(key, number)
        self._count = _RECORDS * count - room

    def pop(self, key: bytes) -> int:
        """Remove `key` and return its number; -1 if it has none. The writer's thread."""
        if len(key) == self._key_bytes:
            index = self._index(key)
            bucket = self._buckets[index]
            at = self._find(bucket, key)
            if at >= 0:
                found: int = self._number.unpack_from(bucket, at + self._key_bytes)[0]
                self._buckets[index] = bucket[:at] + bucket[at + self._record_bytes :]
                self._count -= 1
                return found
        number = self._others.pop(key, -1)
        if self._crowded.get(number) == key:
            del self._crowded[number]
        return number

    def find_numbers(self, hashes: Iterable[int], numbers: Sequence[int]) -> list[bytes | None]:
        """Return the keys that have some numbers; None where no key of length `key_bytes` has one. Any thread.

        No two keys may have one number. `hashes` are the `key_hashes` of the wanted keys.
        """
        return self._with_numbers(hashes, numbers, removes=False)

    def pop_numbers(self, hashes: Iterable[int], numbers: Sequence[int]) -> list[bytes | None]:
        """Remove and return the keys that have some numbers; see `find_numbers`. The writer's thread."""
        return self._with_numbers(hashes, numbers, removes=True)

    def release(self, bucket_count: int) -> bool:
        """Give back the memory of some buckets of a table that nobody uses; return whether any is left.

        The memory of a whole table, given back at once, takes as long as to copy it.
        """
        del self._buckets[-bucket_count:]
        return bool(self._buckets)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over keys and numbers. Any thread; changes that are made meanwhile may be seen or not."""
        size, key_bytes, unpack = self._record_bytes, self._key_bytes, self._number.unpack_from
        buckets = self._buckets
        # Backwards: a split moves keys to a bucket at the end, so each key is met, though perhaps twice.
        for index in range(len(buckets) - 1, -1, -1):
            bucket = buckets[index]
            for at in range(0, len(bucket), size or 1):
                yield bucket[at : at + key_bytes], unpack(bucket, at + key_bytes)[0]
        yield from list(self._others.items())

    def _with_numbers(self, hashes: Iterable[int], numbers: Sequence[int], *, removes: bool) -> list[bytes | None]:
        buckets, size, key_bytes, pack = self._buckets, self._record_bytes, self._key_bytes, self._number.pack
        count, mask = len(buckets), self._mask
        keys, removed = list[bytes | None](), 0
        for index, number, wanted in zip(hashes, numbers, map(pack, numbers), strict=True):
            index &= mask
            if index >= count:
                index &= mask >> 1
            bucket = buckets[index]
            at = bucket.find(wanted, key_bytes)
            while at >= 0 and at % size != key_bytes:  # a key may contain these bytes
                at = bucket.find(wanted, at + 1)
            if at >= 0:
                begin = at - key_bytes
                keys.append(bucket[begin:at])
                if removes:
                    buckets[index] = bucket[:begin] + bucket[begin + size :] if begin else bucket[size:]
                    removed += 1
            else:
                keys.append(self._crowded.get(number) if self._crowded else None)
                if removes and (key := keys[-1]) is not None:
                    del self._crowded[number], self._others[key]
        self._count -= removed
        return keys

    def _use_length(self, key_bytes: int) -> None:
        self._record_bytes = key_bytes + self._number.size
        self._key_bytes = key_bytes

    def _set_other(self, key: bytes, number: int) -> None:
        if len(key) == self._key_bytes:
            old = self._others.get(key, -1)
            if self._crowded.get(old) == key:
                del self._crowded[old]
            self._crowded[number] = key
        self._others[key] = number

    def _index(self, key: bytes) -> int:
        """Return the bucket of `key`: buckets beyond the last one still lie in those of half the mask."""
        index = zlib.crc32(key) & self._mask
        return index if index < len(self._buckets) else index & (self._mask >> 1)

    def _find(self, bucket: bytes, key: bytes, start: int = 0) -> int:
        """Return where the record of `key` begins, from `start` on; -1 if there is none."""
        at = bucket.find(key, start)
        while at >= 0 and at % self._record_bytes:  # the bytes of a key may also lie across two records
            at = bucket.find(key, at + 1)
        return at

    def _split(self) -> None:
        """Add a bucket, and move to it the keys of another one that belong there.

        The mask first, then the new bucket, then the old one: a reader finds each key before, between and after. It
        takes the number of buckets first, and looks again if that has changed.
        """
        buckets, size, key_bytes = self._buckets, self._record_bytes, self._key_bytes
        if len(buckets) > self._mask:
            self._mask = 2 * self._mask + 1
        half = (self._mask + 1) >> 1
        old = len(buckets) - half
        bucket = buckets[old]
        stays: list[bytes] = []
        moves: list[bytes] = []
        for at in range(0, len(bucket), size):
            moving = zlib.crc32(bucket[at : at + key_bytes]) & half
            (moves if moving else stays).append(bucket[at : at + size])
        buckets.append(b"".join(moves))
        buckets[old] = b"".join(stays)

    def _spill(self, index: int) -> None:
        """Move what exceeds a bucket's limit to the dictionary."""
        bucket, limit = self._buckets[index], _RECORDS_MAX * self._record_bytes
        for at in range(limit, len(bucket), self._record_bytes):
            key = bucket[at : at + self._key_bytes]
            self._set_other(key, self._number.unpack_from(bucket, at + self._key_bytes)[0])
            self._count -= 1
        self._buckets[index] = bucket[:limit]


def _ordered(
    keys: NDArray[np.uint8], hashes: NDArray[np.uint32], bucket_count: int, mask: int, threads: int
) -> tuple[NDArray[np.intp], NDArray[np.uint32]]:
    """Return the rows in the order of their buckets, and the bucket of each, without rows whose key comes again later.

    One sort of numbers: the bucket in the upper bits, then the rest of the hash, then the row.
    """
    row_bits = max(1, (len(keys) - 1).bit_length())
    index_bits = mask.bit_length()
    rest_bits = min(32 - index_bits, 64 - row_bits - index_bits)
    places = np.empty(len(keys), np.uint64)

    def place(first: int) -> None:
        own = hashes[first : first + _CHUNK]
        part = bucket_indexes(own, bucket_count).astype(np.uint64)
        part <<= np.uint64(rest_bits)
        if rest_bits:
            part |= own >> np.uint32(32 - rest_bits)
        part <<= np.uint64(row_bits)
        part |= np.arange(first, first + len(own), dtype=np.uint64)
        places[first : first + _CHUNK] = part

    for placed in run_all(place, range(0, len(keys), _CHUNK), "tiered-kv-index", threads):
        placed.result()
    places.sort()
    order = (places & np.uint64((1 << row_bits) - 1)).astype(np.intp)
    places >>= np.uint64(row_bits)
    suspects = np.flatnonzero(places[1:] == places[:-1])
    if len(suspects):  # a hash is equal for equal keys, and for a few others
        suspects = np.union1d(suspects, suspects + 1)
        last: dict[bytes, int] = dict(zip(map(bytes, keys[order[suspects]]), suspects.tolist(), strict=True))
        kept = np.ones(len(order), bool)
        kept[suspects] = False
        kept[np.fromiter(last.values(), np.intp, len(last))] = True
        order, places = order[kept], places[kept]
    places >>= np.uint64(rest_bits)
    return order, places.astype(np.uint32)
