"""A map from keys to numbers that takes little memory, and never pauses: for indexes of millions of blocks.

`PrimaryRows` has one from key to row, and a tier that keeps an index in memory may have one from key to place. One
thread writes at a time. Any thread may read meanwhile, without a lock: it finds a key that is in the table from before
its call until after it. A key is compared whole, so a number is never that of another key.

A dictionary needs two or three objects a key, takes 150 to 200 B, and moves all its entries at once when it grows or
has had many deletions (0.14 s for a million). Here a key and its number are a record in one of many buckets. A bucket
is a `bytes` object of some eight records, and `bytes.find` searches it. A change replaces the bucket, so a reader sees
the old one or the new one. The buckets grow by linear hashing (W. Litwin, "Linear hashing: a new tool for file and
table addressing", VLDB 1980): each time one bucket is split, and no other key moves. A key takes some 60 B.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

_RECORDS = 8
"""Mean number of records in a bucket: fewer take more memory, more take more time."""
_RECORDS_MAX = 64
"""Limit of a bucket, which random keys do not reach; further keys go into the dictionary."""
_CHUNK = 1 << 16
"""How many keys or buckets `build` works on at a time, so that they fit into the processor's cache."""
_NUMBERS: Final = {4: Struct("=I"), 8: Struct("=Q")}


class KeyTable:
    """Numbers by key; see the module.

    Keys of another length than the first one's are in a dictionary: their records would have another size. An engine's
    keys have one length.

    Args:
        number_bytes: The size of a number, which is from 0 up: 4 or 8 bytes.
    """

    __slots__ = ("_buckets", "_count", "_key_bytes", "_mask", "_number", "_others", "_record_bytes")

    def __init__(self, number_bytes: int = 8) -> None:
        self._number = _NUMBERS[number_bytes]
        self._key_bytes = -1  # the length of the keys in buckets; -1 before the first key
        self._record_bytes = 0
        self._buckets: list[bytes] = [b""]
        self._mask = 0
        """2**k - 1, where more than 2**(k - 1) and at most 2**k buckets exist. See `_index`."""
        self._count = 0  # keys in buckets
        self._others: dict[bytes, int] = {}
        """Keys of other lengths, and those of full buckets."""

    @classmethod
    def build(cls, keys: NDArray[np.uint8], numbers: NDArray[np.unsignedinteger], number_bytes: int = 8) -> KeyTable:
        """Return a table of many keys, in some 0.3 µs a key. Of equal keys the last one counts.

        Args:
            keys: The keys, one a row, of shape (n, key bytes).
            numbers: Their numbers, of shape (n,).
            number_bytes: The size of a number.
        """
        table = cls(number_bytes)
        count, key_bytes = keys.shape
        if not count or not key_bytes:
            table.set_many([bytes(key) for key in keys], numbers.tolist())
            return table
        table._use_length(key_bytes)
        bucket_count = -(-count // _RECORDS)
        table._mask = mask = (1 << (bucket_count - 1).bit_length()) - 1
        hashes = _hashes(keys)
        places = (hashes & np.uint64(mask)).astype(np.uint64)
        places = np.where(places < bucket_count, places, places & np.uint64(mask >> 1))
        sort_key = (places << np.uint64(32)) | hashes
        order = np.argsort(sort_key, kind="stable")
        sort_key = sort_key[order]
        order = _without_repeats(keys, order, sort_key)
        places = places[order]
        ends = np.searchsorted(places, np.arange(bucket_count + 1, dtype=np.uint64)).tolist()
        buckets: list[bytes] = []
        size, number_type = table._record_bytes, np.dtype(f"=u{number_bytes}")
        for first in range(0, bucket_count, _CHUNK):
            bounds = ends[first : first + _CHUNK + 1]
            part = order[bounds[0] : bounds[-1]]
            records = np.empty((len(part), size), np.uint8)
            records[:, :key_bytes] = keys[part]
            own = np.ascontiguousarray(numbers[part], number_type)
            records[:, key_bytes:] = own.view(np.uint8).reshape(len(part), number_bytes)
            content = records.tobytes()
            start = bounds[0]
            buckets += [content[(a - start) * size : (b - start) * size] for a, b in pairwise(bounds)]
        table._buckets = buckets
        table._count = len(order)
        for place in np.flatnonzero(np.diff(ends) > _RECORDS_MAX).tolist():
            table._spill(place)
        return table

    def __len__(self) -> int:
        return self._count + len(self._others)

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) >= 0

    def get(self, key: bytes) -> int:
        """Return the number of `key`; -1 if it has none. Any thread."""
        key_bytes = self._key_bytes
        if len(key) == key_bytes:
            buckets, mask = self._buckets, self._mask
            count = len(buckets)
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

    def get_many(self, keys: Iterable[bytes]) -> list[int]:
        """Return the number of each key; -1 if it has none. Any thread."""
        return list(map(self.get, keys))

    def set(self, key: bytes, number: int) -> None:
        """Give `key` a number, in place of one that it has. The writer's thread."""
        self.set_many((key,), (number,))

    def set_many(self, keys: Sequence[bytes], numbers: Iterable[int]) -> None:
        """Give each key a number, in place of one that it has. The writer's thread."""
        if self._key_bytes < 0 and keys and keys[0]:
            self._use_length(len(keys[0]))
        key_bytes, size, pack, others = self._key_bytes, self._record_bytes, self._number.pack, self._others
        buckets = self._buckets
        for key, number in zip(keys, numbers, strict=True):
            if len(key) != key_bytes or (others and key in others):
                others[key] = number
                continue
            index = self._index(key)
            bucket = buckets[index]
            at = self._find(bucket, key)
            if at >= 0:
                buckets[index] = b"".join((bucket[: at + key_bytes], pack(number), bucket[at + size :]))
            elif len(bucket) < _RECORDS_MAX * size:
                buckets[index] = b"".join((bucket, key, pack(number)))
                self._count += 1
                if self._count > _RECORDS * len(buckets):
                    self._split()
            else:
                others[key] = number

    def pop(self, key: bytes) -> int:
        """Remove `key` and return its number; -1 if it has none. The writer's thread."""
        if len(key) == self._key_bytes:
            index = self._index(key)
            bucket = self._buckets[index]
            at = self._find(bucket, key)
            if at >= 0:
                number: int = self._number.unpack_from(bucket, at + self._key_bytes)[0]
                self._buckets[index] = bucket[:at] + bucket[at + self._record_bytes :]
                self._count -= 1
                return number
        return self._others.pop(key, -1)

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

    def _use_length(self, key_bytes: int) -> None:
        self._record_bytes = key_bytes + self._number.size
        self._key_bytes = key_bytes

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

        The mask first, then the new bucket, then the old one: a reader finds each key before, between and after.
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
            record = bucket[at : at + size]
            (moves if zlib.crc32(record[:key_bytes]) & half else stays).append(record)
        buckets.append(b"".join(moves))
        buckets[old] = b"".join(stays)

    def _spill(self, index: int) -> None:
        """Move what exceeds a bucket's limit to the dictionary."""
        bucket, limit = self._buckets[index], _RECORDS_MAX * self._record_bytes
        for at in range(limit, len(bucket), self._record_bytes):
            key = bucket[at : at + self._key_bytes]
            self._others[key] = self._number.unpack_from(bucket, at + self._key_bytes)[0]
            self._count -= 1
        self._buckets[index] = bucket[:limit]


def _hashes(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return `zlib.crc32` of each row. It is affine: the exclusive or of one value for each byte and a constant."""
    count, key_bytes = keys.shape
    zeros = bytes(key_bytes)
    constant = zlib.crc32(zeros)
    tables = np.array(
        [
            [zlib.crc32(zeros[:column] + bytes((value,)) + zeros[column + 1 :]) ^ constant for value in range(256)]
            for column in range(key_bytes)
        ],
        np.uint32,
    ).reshape(key_bytes, 256)
    hashes = np.empty(count, np.uint64)
    for first in range(0, count, _CHUNK):
        part = keys[first : first + _CHUNK]
        of_part = np.full(len(part), constant, np.uint32)
        for column, table in zip(part.T, tables, strict=True):
            of_part ^= table[column]
        hashes[first : first + _CHUNK] = of_part
    return hashes


def _without_repeats(
    keys: NDArray[np.uint8], order: NDArray[np.intp], sort_key: NDArray[np.uint64]
) -> NDArray[np.intp]:
    """Return `order` without rows whose key comes again later; `sort_key` is that of `order`, and equal for equal keys.

    Few keys that differ have one hash, so only the rows of equal hashes are compared.
    """
    same = sort_key[1:] == sort_key[:-1]
    suspects = np.flatnonzero(np.concatenate((same, [False])) | np.concatenate(([False], same)))
    last: dict[bytes, int] = dict(zip(map(bytes, keys[order[suspects]]), suspects.tolist(), strict=True))
    kept = np.ones(len(order), bool)
    kept[suspects] = False
    kept[np.fromiter(last.values(), np.intp, len(last))] = True
    return order[kept]
