"""Where the bytes of a block lie, in the tensors of a device's KV cache and in a row of the region; and the runs of
bytes that a transfer copies.

A row of the region holds one offloaded block, that is `block_size_factor` device blocks of one KV cache group. Each
worker owns the same part of every row. The part contains the pages of each of the group's refs, in order. A ref has one
page for each device block of the offloaded block. Pages follow each other without padding:

    row     | worker 0                                      | worker 1 ...
    part    | ref 0                 | ref 1                 |
            | page 0 | page 1 | ... | page 0 | page 1 | ... |

So device blocks that are neighbours on both sides can be copied as one run. A store that leaves out pages of its rows
is refused: the pages would hold another block's bytes. Bytes of a part that a group does not use are never read.

With pipeline stages a worker may have no layer of a group, and so no ref. It copies nothing for that group.

A ref may have a mapping to a canonical page, whose bytes do not depend on the number of workers. Then all workers share
one part of canonical pages, and each worker copies the pieces that it has. If several workers have the same piece, the
first stores it.

The handlers call it, on the thread of an engine's worker. It computes addresses, and reads no memory. A plan touches
only rows and pages of its spec. The work for a job is a few array operations, whatever the number of its blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferSpec,
    TransferType,
)
from tiered_kv.config.units import format_bytes
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.mediums import CPULoadStoreSpec

if TYPE_CHECKING:
    import torch

Int64Array = np.ndarray[Any, np.dtype[np.int64]]

PIECE = np.dtype(
    [
        ("address", np.int64),  # of the piece in device block 0
        ("stride", np.int64),  # bytes from a device block to the next
        ("bytes", np.int64),
        ("row_offset", np.int64),  # in bytes, of the first page's piece in the worker's part of a row
        ("row_stride", np.int64),  # bytes from it to the same piece of the row's next page
        ("is_stored", np.bool_),  # whether this worker stores it
    ],
    align=True,
)
"""A piece of a ref's page; without a mapping, the whole page."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group.

    Args:
        pieces: An array of `PIECE` of shape (pieces, 1), ready to be broadcast over blocks.
        num_blocks: The fewest device blocks of the refs' tensors; without refs, of all tensors.
    """

    pieces: np.ndarray[Any, np.dtype[np.void]]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Both sides of a worker's copies; `part_address` is the address of the worker's part of row 0."""

    groups: tuple[GroupLayout, ...]
    block_size_factor: int
    part_address: int
    row_bytes: int
    num_rows: int

    def stored(self) -> BlockLayout:
        """Return the layout without the pieces that another worker stores. Loads use the whole layout."""
        stored = [each.pieces[each.pieces["is_stored"][:, 0]] for each in self.groups]
        groups = (GroupLayout(pieces, each.num_blocks) for pieces, each in zip(stored, self.groups, strict=True))
        return dataclasses.replace(self, groups=tuple(groups))


def lay_out(
    kv_caches: CanonicalKVCaches,
    region: PrimaryRegion,
    *,
    block_size_factor: int = 1,
    part_offset: int = 0,
    part_bytes: int | None = None,
) -> BlockLayout:
    """Return the layout of `kv_caches` in `region`; the arguments are the ones of `open_handlers`.

    Raises:
        ValueError: The caches contradict themselves, or a block of them does not fit into the part.
    """
    if block_size_factor < 1:
        raise ValueError(f"block_size_factor must be at least 1, found {block_size_factor}")
    if not any(kv_caches.group_data_refs):
        raise ValueError("the KV caches have no group with a tensor: group_data_refs is empty")
    room_bytes = region.block_bytes - part_offset
    part_bytes = room_bytes if part_bytes is None else part_bytes
    if part_offset < 0 or not 0 <= part_bytes <= room_bytes:
        raise ValueError(
            f"a part of {part_bytes} bytes at offset {part_offset} does not lie in a row of {region.block_bytes} bytes"
        )
    rows = [_rows_of(cache, index) for index, cache in enumerate(kv_caches.tensors)]
    groups = []
    for index, refs in enumerate(kv_caches.group_data_refs):
        group = _lay_out_group(rows, refs, index, block_size_factor)
        needed_bytes = block_size_factor * sum(map(offloaded_bytes, refs))
        if needed_bytes > part_bytes:
            raise ValueError(
                f"an offloaded block of group {index} has {format_bytes(needed_bytes)} ({len(refs)} refs, "
                f"{block_size_factor} device blocks), and this worker's part of a row is {format_bytes(part_bytes)}"
            )
        groups.append(group)
    part_address = region.array.ctypes.data + part_offset
    return BlockLayout(tuple(groups), block_size_factor, part_address, region.block_bytes, region.num_blocks)


def device_of(kv_caches: CanonicalKVCaches) -> torch.device:
    """Return the device that all tensors are on.

    Raises:
        ValueError: There is no tensor, or they are on several devices.
    """
    devices = {cache.tensor.device for cache in kv_caches.tensors}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"the KV caches must be on one device, found {found}")
    return devices.pop()


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor as rows, one for each device block."""

    address: int
    """The address of the first row."""
    row_bytes: int
    stride_bytes: int
    num_blocks: int


def _rows_of(cache: CanonicalKVCacheTensor, index: int) -> _Rows:
    """Return how the blocks of a tensor follow each other, and how many bytes of each are the tensor's own.

    Either a block is an entry of the first dimension, possibly with gaps between blocks. Or the tensor
    is contiguous, and is divided into pages.
    """
    tensor, page_bytes = cache.tensor, cache.page_size_bytes
    if page_bytes < 1 or tensor.dim() < 1 or not tensor.numel():
        raise ValueError(f"tensor {index} of shape {tuple(tensor.shape)} with pages of {page_bytes} bytes has no block")
    item_bytes = tensor.element_size()
    row_bytes = tensor[0].numel() * item_bytes
    stride_bytes = tensor.stride(0) * item_bytes if tensor.shape[0] > 1 else max(page_bytes, row_bytes)
    if not tensor[0].is_contiguous():
        raise ValueError(f"a block of tensor {index} is not contiguous: its strides are {tuple(tensor.stride())}")
    if page_bytes in (row_bytes, stride_bytes) and row_bytes <= stride_bytes:
        return _Rows(tensor.data_ptr(), row_bytes, stride_bytes, tensor.shape[0])
    num_blocks, rest = divmod(tensor.numel() * item_bytes, page_bytes)
    if rest or not tensor.is_contiguous():
        raise ValueError(
            f"tensor {index} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} ({item_bytes} bytes "
            f"an element) cannot be cut into pages of {page_bytes} bytes"
        )
    return _Rows(tensor.data_ptr(), page_bytes, page_bytes, num_blocks)


def _lay_out_group(
    rows: Sequence[_Rows],
    refs: Sequence[CanonicalKVCacheRef],
    group: int,
    factor: int,
) -> GroupLayout:
    for ref in refs:
        if not 0 <= ref.tensor_idx < len(rows):
            raise ValueError(f"group {group} refers to tensor {ref.tensor_idx}, and there are {len(rows)} tensors")
        page_bytes = rows[ref.tensor_idx].row_bytes
        if not 1 <= ref.page_size_bytes <= page_bytes:
            raise ValueError(
                f"group {group} uses {ref.page_size_bytes} bytes of tensor {ref.tensor_idx}, "
                f"whose blocks have {page_bytes}"
            )
    pieces: list[tuple[int, int, int, int, int, bool]] = []
    row_offset = 0
    for ref in refs:
        row_stride = offloaded_bytes(ref)
        for page_offset, offset, size in _pieces_of(ref):
            at = rows[ref.tensor_idx]
            is_stored = ref.mapping is None or ref.mapping.writer_index == 0
            pieces.append((at.address + page_offset, at.stride_bytes, size, row_offset + offset, row_stride, is_stored))
        row_offset += factor * row_stride
    num_blocks = min(each.num_blocks for each in [rows[ref.tensor_idx] for ref in refs] or rows)
    return GroupLayout(np.array(pieces, PIECE).reshape(-1, 1), num_blocks)


def offloaded_bytes(ref: CanonicalKVCacheRef) -> int:
    """Return how many bytes a ref's page has in a row, for one device block."""
    return ref.page_size_bytes if ref.mapping is None else ref.mapping.canonical_page_size_bytes


def _pieces_of(ref: CanonicalKVCacheRef) -> Iterator[tuple[int, int, int]]:
    """Yield each piece's offset in the worker's page, its offset in the offloaded page, and its bytes."""
    if ref.mapping is None:
        yield 0, 0, ref.page_size_bytes
        return
    for run in ref.mapping.runs:
        for number in range(run.num_fragments):
            local, canonical = number * run.local_stride, number * run.canonical_stride
            yield run.local_offset + local, run.canonical_offset + canonical, run.fragment_size


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


def plan_transfer(layout: BlockLayout, kind: TransferType, spec: TransferSpec) -> CopyPlan:
    """Return the runs that a transfer copies.

    Args:
        layout: Where blocks lie.
        kind: `STORE` or `LOAD`.
        spec: Source and destination. The device's spec has `block_ids`, `group_sizes` (None for one group) and
            `block_indices` (None where each group begins an offloaded block); the region's has `block_ids`, one for
            each offloaded block that is touched, group by group. A load may read parts of its first and last row. A
            store writes whole rows: a part that it left out would keep bytes of the row's former block.

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
            if group.pieces.size:
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
    # Of shape (pieces, blocks), so that a ref's pages follow each other. Pages of two tensors are never joined: they
    # may belong to two allocations.
    piece = group.pieces
    device = piece["address"] + device_ids * piece["stride"]
    parts = layout.part_address + rows * layout.row_bytes
    region = parts + (piece["row_offset"] + pages_in_row * piece["row_stride"])
    begins = np.ones(device.shape, dtype=np.bool_)
    begins[:, 1:] = (np.diff(device) != piece["bytes"]) | (np.diff(region) != piece["bytes"])
    starts = np.flatnonzero(begins)
    lengths = np.broadcast_to(piece["bytes"], device.shape).ravel()
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
    """Return how many device blocks each group has, and the index of each group's first one in the request."""
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
