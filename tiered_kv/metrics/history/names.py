"""Whole keys of blocks by the names that events give them: the last 64 bits of a block's hash, and its group.

The ledger notes the keys that tiers have stored or requests have used, and prefetches ask, both under the history's
lock. What must stay true: memory is bounded. A name that was forgotten is unknown; it never finds another block's key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.base import OffloadKey

KEY_BYTES_MAX: Final = 68
"""The longest key that is remembered: a hash of 64 bytes, and the group."""
ENTRIES_MAX: Final = 1 << 20
_WAYS: Final = 4
_KEY_BYTES_MIN: Final = 12
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
"""An odd number whose products are spread evenly: 2**64 divided by the golden ratio (Knuth, TAOCP 3, 6.4)."""
Names = NDArray[np.uint64]
Places = NDArray[np.int64]


class KeyNames:
    """A table of about `entries` keys; a newer key replaces one of the four in its place. The caller serializes."""

    def __init__(self, entries: int) -> None:
        bits = max(1, (min(entries, ENTRIES_MAX) // _WAYS).bit_length() - 1)
        self._shift = np.uint64(64 - bits)
        self._names: Names = np.zeros((1 << bits, _WAYS), np.uint64)
        self._keys = np.zeros((1 << bits, _WAYS, KEY_BYTES_MAX), np.uint8)
        self._sizes = np.zeros((1 << bits, _WAYS), np.uint8)
        self._turn = 0

    def note(self, keys: Sequence[OffloadKey]) -> None:
        """Remember keys; those that are too short or too long are left out."""
        for size, alike in _by_size(keys):
            if not _KEY_BYTES_MIN <= size <= KEY_BYTES_MAX:
                continue
            table = np.frombuffer(b"".join(alike), np.uint8).reshape(-1, size)
            hashes = np.ascontiguousarray(table[:, -12:-4]).view(">u8")[:, 0].astype(np.uint64)
            groups = np.ascontiguousarray(table[:, -4:]).view(">u4")[:, 0].astype(np.uint64)
            names, places = self._placed(hashes, groups)
            left = np.arange(len(names))
            while len(left):  # one key of each place at a time: two of a place get two ways
                first = left[np.unique(places[left], return_index=True)[1]]
                self._write(names[first], places[first], table[first])
                left = left[~np.isin(left, first)]

    def _write(self, names: Names, places: Places, keys: NDArray[np.uint8]) -> None:
        """Write keys of distinct places, over themselves, into an empty way, or over each way in turn."""
        used = self._sizes[places] > 0
        known = used & (self._names[places] == names[:, None])
        ways = np.where(used.all(1), self._turn, used.argmin(1))
        ways = np.where(known.any(1), known.argmax(1), ways)
        self._turn = (self._turn + 1) % _WAYS
        size = keys.shape[1]
        self._names[places, ways], self._sizes[places, ways] = names, size
        self._keys[places, ways, :size] = keys

    def find(self, hashes: Sequence[int], group: int) -> list[OffloadKey | None]:
        """Return the key of each block by the last 64 bits of its hash; None if it is not known."""
        wanted = np.array(hashes, np.uint64)
        names, places = self._placed(wanted, np.full(len(wanted), group, np.uint64))
        known = (self._names[places] == names[:, None]) & (self._sizes[places] > 0)
        found: list[OffloadKey | None] = []
        for place, way, is_known, given in zip(places, known.argmax(1), known.any(1), hashes, strict=True):
            key = OffloadKey(self._keys[place, way, : self._sizes[place, way]].tobytes())
            is_same = is_known and key[-12:] == given.to_bytes(8, "big") + group.to_bytes(4, "big")
            found.append(key if is_same else None)
        return found

    def _placed(self, hashes: Names, groups: Names) -> tuple[Names, Places]:
        names = hashes ^ (groups * _SPREAD)
        return names, ((names * _SPREAD) >> self._shift).astype(np.int64)


def _by_size(keys: Sequence[OffloadKey]) -> Iterator[tuple[int, Sequence[OffloadKey]]]:
    sizes = set(map(len, keys))
    if len(sizes) <= 1:  # as an engine's
        yield from ((size, keys) for size in sizes)
        return
    for size in sizes:
        yield size, [key for key in keys if len(key) == size]
