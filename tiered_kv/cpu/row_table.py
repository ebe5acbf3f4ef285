"""What the primary tier keeps of each row, in lists with one entry a row: no object for a block.

`CPUBackend` makes one, `PrimaryRows` and `RequestChain` write it, and the policies read it, all on the scheduler's
thread. What must stay true: an entry describes the block that is in the row now, and a free row has no key.

A million objects would take 500 MB, and the collector would stop the engine's process for seconds to visit them. A list
takes 8 B a row, its entries are shared (small numbers, positions, the chain of a request, the number of a step), and
to read or write one takes a quarter of the time that an entry of an array takes.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, TypeVar

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import DEFAULT_TENANT

NO_KEY: Final = OffloadKey(b"")
A_LOAD: Final = 1 << 20
"""What a load of an engine adds to `RowTable.ref_cnt`. All other pins of a row are fewer."""
ABSENT: Final = -1
"""Stands for the row of a key that has none."""
Container = TypeVar("Container", list[Any], dict[Any, Any])  # Any: of entries without a way back to it
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def in_writing(row: int) -> int:
    """Return the number that stands for a row in an index while it is being written; of such a number, the row."""
    return -2 - row


def unwatched(container: Container) -> Container:
    """Take a list or dictionary out of the collector's sight, and return it.

    The collector visits each entry of each container to find circles. CPython leaves out containers by itself whose
    entries cannot be part of a circle, but no list. The caller knows that no entry leads back to this one.
    """
    _untrack(container)
    return container


class RowTable:
    """The state of each row that has been used, by its number.

    Attributes:
        num_blocks: Rows of the primary tier, also those that have not been used yet.
        key: The key of its block; `NO_KEY` while it is free.
        ref_cnt: -1 while it is free, the number of its writer (-2 and less) while it is written, and 0 while it may be
            evicted. Else its pins: `A_LOAD` for each load of an engine, and 1 for each other.
        step: The last scheduler step in which a lookup found its block; -1 without one.
        chain: The request that used its block last; None for a row that is free, or was forgotten while in use.
        position: The position of its block in `chain`, head first.
        source: The number of the tier that its block was promoted from; 0 if the engine stored it.
        is_frequent: Of the policy arc, which lengthens it: whether its block was seen used again. The policies of
            several tenants share it.
    """

    __slots__ = ("chain", "is_frequent", "key", "num_blocks", "position", "ref_cnt", "source", "step")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.key: list[OffloadKey] = unwatched([])
        self.ref_cnt: list[int] = unwatched([])
        self.step: list[int] = unwatched([])
        self.chain: list[Any] = unwatched([])  # Any: `RequestChain`, whose file imports this one, or None
        self.position: list[int] = unwatched([])
        self.source: list[int] = unwatched([])
        self.is_frequent: list[bool] = unwatched([])

    def __len__(self) -> int:
        """Return how many rows have been used, from the first on."""
        return len(self.key)

    def tenant(self, row: int) -> str:
        """Return the tenant of the request that used a row's block last."""
        chain = self.chain[row]
        return (chain is not None and chain.hints is not None and chain.hints.tenant) or DEFAULT_TENANT

    def grow(self, count: int) -> range:
        """Add the next `count` rows, which are free, and return them."""
        first = len(self.key)
        self.key += [NO_KEY] * count
        self.ref_cnt += [-1] * count
        self.step += [-1] * count
        self.chain += [None] * count
        self.position += [0] * count
        self.source += [0] * count
        return range(first, first + count)
