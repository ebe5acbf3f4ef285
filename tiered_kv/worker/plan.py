"""From the block numbers of a transfer to the runs of bytes that it copies, and what a device does with these.

Integers only: nothing here reads memory or knows a device. The work for a job is a few array operations, whatever the
number of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tiered_kv.base import GPULoadStoreSpec, TransferSpec, TransferType
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker.layout import BlockLayout, GroupLayout, Int64Array

STORE: TransferType = (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())
LOAD: TransferType = (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Runs to copy, each contiguous on both sides: addresses, and lengths in bytes.

    The arrays, of shape (runs,), are contiguous as well: native code reads them.
    """

    sources: Int64Array
    destinations: Int64Array
    lengths: Int64Array

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.lengths.sum())


class Copy(Protocol):
    """A plan that was handed to a copier. The copier's thread or device works on it; one thread asks."""

    def has_ended(self) -> bool:
        """Return at once whether nothing of the plan is still to be copied."""

    def wait(self) -> None:
        """Block until it has ended."""

    def seconds(self) -> float | None:
        """Return how long an ended copy took, or None if it failed or was dropped; asked once."""


class Copier(Protocol):
    """Executes plans one after the other."""

    def submit(self, plan: CopyPlan) -> Copy:
        """Begin a plan behind those before it, and return at once."""

    def close(self) -> None:
        """Wait for the plans that run, drop the others, and release everything; called once."""


def plan_transfer(layout: BlockLayout, kind: TransferType, spec: TransferSpec) -> CopyPlan:
    """Return the runs that a transfer copies.

    Args:
        layout: Where blocks lie.
        kind: `STORE` or `LOAD`.
        spec: Source and destination. The device's spec has `block_ids`, `group_sizes` (None for one group) and
            `block_indices` (None where each group begins an offloaded block); the region's has `block_ids`, one for
            each offloaded block that is touched, group by group. A load may read parts of its first and last row. A
            store writes whole rows: the missing bytes would be those of the row's former block.

    Raises:
        TypeError, ValueError: An argument is no spec, the specs do not fit each other or the layout, or a store
            leaves out device blocks of its rows.
    """
    device_spec, region_spec = reversed(spec) if kind == LOAD else spec
    device_ids = _ids_of(device_spec, "device block_ids")
    row_ids = _ids_of(region_spec, "region block_ids")
    sizes, firsts = _groups_of(device_spec, len(device_ids), len(layout.groups))
    _check_range(row_ids, layout.num_rows, "region block_ids")
    factor = layout.block_size_factor
    skips = [first % factor for first in firsts]
    if kind == STORE:
        _check_whole(sizes, skips, factor)
    num_rows = [-(-(skip + size) // factor) if size else 0 for skip, size in zip(skips, sizes, strict=True)]
    if sum(num_rows) != len(row_ids):
        raise ValueError(
            f"{len(device_ids)} device blocks in groups of {list(sizes)} beginning at {list(firsts)} touch "
            f"{sum(num_rows)} offloaded blocks of {factor}, found {len(row_ids)} region block_ids"
        )
    parts = []
    device_at = row_at = 0
    for index, (group, size, skip, rows) in enumerate(zip(layout.groups, sizes, skips, num_rows, strict=True)):
        if size:
            ids = device_ids[device_at : device_at + size]
            _check_range(ids, group.num_blocks, f"device block_ids of group {index}")
            if group.page_bytes.size:
                parts.append(_runs_of_group(layout, group, ids, row_ids[row_at : row_at + rows], skip))
            device_at += size
            row_at += rows
    if not parts:
        nothing = np.empty(0, dtype=np.int64)
        return CopyPlan(nothing, nothing, nothing)
    device, region, lengths = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return CopyPlan(region, device, lengths) if kind == LOAD else CopyPlan(device, region, lengths)


def _runs_of_group(
    layout: BlockLayout, group: GroupLayout, device_ids: Int64Array, row_ids: Int64Array, skip: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return device addresses, region addresses and lengths of the runs that make up blocks of one group."""
    pages = np.arange(skip, skip + len(device_ids), dtype=np.int64)
    rows, pages_in_row = row_ids[pages // layout.block_size_factor], pages % layout.block_size_factor
    # Of shape (pieces, blocks), so that a ref's pages follow each other. Neighbours in memory belong to one
    # allocation only within a tensor.
    device = group.addresses + device_ids * group.strides
    region = (layout.part_address + rows * layout.row_bytes) + (group.row_offsets + pages_in_row * group.row_strides)
    begins = np.ones(device.shape, dtype=np.bool_)
    begins[:, 1:] = (np.diff(device) != group.page_bytes) | (np.diff(region) != group.page_bytes)
    starts = np.flatnonzero(begins)
    lengths = np.broadcast_to(group.page_bytes, device.shape).ravel()
    return device.ravel()[starts], region.ravel()[starts], np.add.reduceat(lengths, starts)


def _ids_of(spec: object, what: str) -> Int64Array:
    ids = getattr(spec, "block_ids", None)
    if ids is None:
        raise TypeError(f"{type(spec).__name__} is no spec of blocks: it has no block_ids")
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"{what} must be integers of shape (n,), found {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64, copy=False)


def _groups_of(spec: object, num_ids: int, num_groups: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return how many device blocks each group has, and the index in the request of each group's first."""
    sizes = getattr(spec, "group_sizes", None)
    sizes = [num_ids] if sizes is None else [int(size) for size in sizes]
    firsts = getattr(spec, "block_indices", None)
    firsts = [0] * len(sizes) if firsts is None else [int(first) for first in firsts]
    if not len(sizes) == len(firsts) == num_groups:
        raise ValueError(
            f"expected group_sizes and block_indices of {num_groups} groups, found {len(sizes)} and {len(firsts)}"
        )
    if sum(sizes) != num_ids or min(sizes) < 0 or min(firsts) < 0:
        raise ValueError(f"group_sizes {sizes} at block_indices {firsts} do not describe {num_ids} device block_ids")
    return sizes, firsts


def _check_whole(sizes: Sequence[int], skips: Sequence[int], factor: int) -> None:
    for group, (size, skip) in enumerate(zip(sizes, skips, strict=True)):
        if size and (skip or size % factor):
            raise ValueError(
                f"expected a store of whole offloaded blocks, {factor} device blocks each, found {size} device blocks "
                f"of group {group} from place {skip} of an offloaded block on; what is left out would hold another "
                "block's bytes"
            )


def _check_range(ids: Int64Array, limit: int, what: str) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < limit):
        wrong = ids[(ids < 0) | (ids >= limit)]
        raise ValueError(f"{what} must be 0 to {limit - 1}, found {int(wrong[0])}")
