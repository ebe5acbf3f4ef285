"""What a copy reads: blocks of a storage, and which of them.

A `Copier` calls it, on its thread, while other processes may use the storage.
"""

from __future__ import annotations

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

_SAME_S: Final = 2.0  # uses that are no further apart count as one: a server tells whole seconds, by its own clock
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
    since_s: float | None = None
    """The last use of the coldest blocks to move, in seconds of Unix time; None if all are moved."""
    since_bytes: int = 0  # how many bytes of those with about this time


@dataclass(eq=False)
class BlocksToCopy:
    """The blocks of one namespace of a storage. The storage is listed twice: to plan, and to copy.

    A plan takes 16 bytes of memory for each block.
    """

    source: RecordSource
    digest: str
    block_bytes: int
    selection: Selection

    def plan(self) -> Plan:
        """List the storage. Raises what its methods raise; `NotImplementedError` if its blocks cannot be copied."""
        used, sizes = array("d"), array("q")
        for batch in self._listed():
            used.extend(-1.0 if each.used_s is None else each.used_s for each in batch)
            sizes.extend(self.size_bytes(each) for each in batch)
        total_bytes, bytes_max = sum(sizes), self.selection.bytes_max
        if bytes_max is None or total_bytes <= bytes_max:
            return Plan(len(sizes), total_bytes)
        ages, by_age = np.frombuffer(used), np.frombuffer(sizes, np.int64)
        order = np.argsort(-ages, kind="stable")
        ends = np.cumsum(by_age[order])
        count = int(np.searchsorted(ends, bytes_max, side="right"))
        moved_bytes = int(ends[count - 1]) if count else 0
        since_s = float(ages[order[max(0, count - 1)]])
        warmer_bytes = int(by_age[ages > since_s + _SAME_S].sum())
        return Plan(
            count, moved_bytes, len(sizes) - count, total_bytes - moved_bytes, since_s, bytes_max - warmer_bytes
        )

    def planned(self, plan: Plan) -> Iterator[Sequence[StoredBlock]]:
        """Yield the blocks to copy, in batches, as the storage lists them now."""
        if plan.since_s is None:
            yield from self._listed()
            return
        left_bytes = plan.since_bytes
        for batch in self._listed():
            chosen = []
            for each in batch:
                used_s = -1.0 if each.used_s is None else each.used_s
                if used_s > plan.since_s + _SAME_S:
                    chosen.append(each)
                elif used_s >= plan.since_s - _SAME_S and self.size_bytes(each) <= left_bytes:
                    left_bytes -= self.size_bytes(each)
                    chosen.append(each)
            yield chosen

    def read(
        self, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], limit_s: float
    ) -> list[RecordStatus | str]:
        return list(self.source.read_records(self.digest, blocks, rows, time.monotonic() + limit_s))

    def size_bytes(self, block: StoredBlock) -> int:
        """Return about how many bytes the copy of a block moves."""
        return self.block_bytes + HEADER_BYTES if block.size_bytes is None else block.size_bytes

    def _listed(self) -> Iterator[Sequence[StoredBlock]]:
        return self.source.blocks(self.digest, self.selection.keys, time.monotonic() + _LIST_S)
