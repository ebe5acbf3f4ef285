"""What a copy reads: blocks of a storage, and which of them.

A `Copier` calls it, on its thread, while other processes may use the storage.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.administration import StoredBlock
from tiered_kv.toolkit.record import HEADER_BYTES

_LIST_S: Final = 30 * 86_400.0
"""The deadline of a listing, which lasts as long as the copy. Each batch has a shorter one."""


class RecordSource(Protocol):
    """The two methods of `TierAdministration` that a copy needs."""

    def blocks(
        self, digest: str, keys: Collection[OffloadKey] | None, deadline: float
    ) -> Iterator[Sequence[StoredBlock]]:
        """See `TierAdministration.blocks`."""

    def read_records(
        self, digest: str, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], deadline: float
    ) -> Sequence[RecordStatus | str]:
        """See `TierAdministration.read_records`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks a copy moves: those of `keys` if given; of them, the last used ones up to `bytes_max`."""

    keys: Collection[OffloadKey] | None = None
    bytes_max: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks that a copy finds to move, before it begins. Others may be stored or deleted meanwhile."""

    blocks: int
    size_bytes: int
    left_out: int = 0  # blocks beyond `Selection.bytes_max`
    left_out_bytes: int = 0
    chosen: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    """The hashes of the keys to copy, in order; None if all are."""


@dataclass(eq=False)
class BlocksToCopy:
    """The blocks of one namespace of a storage. The storage is listed twice: to plan, and to copy.

    A plan takes 24 bytes of memory for each block. It knows the blocks by their keys, and not by their age: a server
    tells ages in whole seconds, which differ between the two listings.
    """

    source: RecordSource
    digest: str
    block_bytes: int
    selection: Selection

    def plan(self) -> Plan:
        """List the storage. Raises what its methods raise; `NotImplementedError` if its blocks cannot be copied."""
        used, sizes, hashes = array("d"), array("q"), array("q")
        for batch in self._listed():
            used.extend(-1.0 if each.used_s is None else each.used_s for each in batch)
            sizes.extend(self.size_bytes(each) for each in batch)
            hashes.extend(hash(each.key) for each in batch)
        total_bytes, bytes_max = sum(sizes), self.selection.bytes_max
        if bytes_max is None or total_bytes <= bytes_max:
            return Plan(len(sizes), total_bytes)
        order = np.argsort(-np.frombuffer(used), kind="stable")
        ends = np.cumsum(np.frombuffer(sizes, np.int64)[order])
        count = int(np.searchsorted(ends, bytes_max, side="right"))
        moved_bytes = int(ends[count - 1]) if count else 0
        chosen = np.sort(np.frombuffer(hashes, np.int64)[order[:count]])
        return Plan(count, moved_bytes, len(sizes) - count, total_bytes - moved_bytes, chosen)

    def planned(self, plan: Plan) -> Iterator[Sequence[StoredBlock]]:
        """Yield the blocks to copy, in batches, as the storage lists them now."""
        for batch in self._listed():
            if plan.chosen is None:
                yield batch
            elif len(plan.chosen):
                hashes = np.fromiter((hash(each.key) for each in batch), np.int64, len(batch))
                at = np.searchsorted(plan.chosen, hashes).clip(max=len(plan.chosen) - 1)
                yield list(itertools.compress(batch, plan.chosen[at] == hashes))

    def read(
        self, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], limit_s: float
    ) -> list[RecordStatus | str]:
        return list(self.source.read_records(self.digest, blocks, rows, time.monotonic() + limit_s))

    def size_bytes(self, block: StoredBlock) -> int:
        """Return about how many bytes the copy of a block moves."""
        return self.block_bytes + HEADER_BYTES if block.size_bytes is None else block.size_bytes

    def _listed(self) -> Iterator[Sequence[StoredBlock]]:
        return self.source.blocks(self.digest, self.selection.keys, time.monotonic() + _LIST_S)
