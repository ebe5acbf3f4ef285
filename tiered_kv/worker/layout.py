"""Where the bytes of a block lie: in the tensors of a device's KV cache, and in a row of the region.

A row of the region holds one offloaded block, that is `block_size_factor` device blocks of one KV cache group. Each
worker owns the same part of every row. The part contains the pages of each of the group's refs, in order. A ref has one
page for each device block of the offloaded block. Pages follow each other without padding:

    row     | worker 0                                      | worker 1 ...
    part    | ref 0                 | ref 1                 |
            | page 0 | page 1 | ... | page 0 | page 1 | ... |

So device blocks that are neighbours on both sides can be copied as one run. A store that leaves out pages of its rows
is refused: those pages would hold another block's bytes. Bytes of a part that a group does not use are never read.

With pipeline stages a worker may have no layer of a group, and so no ref. It copies nothing for that group.

A ref may have a mapping to a canonical page, whose bytes do not depend on the number of workers. Then all workers have
one part, its pages are canonical, and a worker copies the pieces that it has. Of workers that have the same piece, the
first stores it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from tiered_kv.config.units import format_bytes
from tiered_kv.cpu.region import PrimaryRegion

if TYPE_CHECKING:
    import torch

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group. The arrays are of shape (pieces, 1), ready to be broadcast over blocks.

    A ref without a mapping is one piece, its whole page.

    Args:
        addresses: Of each piece in device block 0.
        strides: Bytes from a device block to the next.
        page_bytes: Bytes of the piece.
        row_offsets: Offset of the piece of the first page in the worker's part of a row.
        row_strides: Bytes from it to that of the next page of the row.
        is_stored: Whether this worker stores the piece.
        num_blocks: Device blocks that all of the refs have; without refs, those that all tensors have.
    """

    addresses: Int64Array
    strides: Int64Array
    page_bytes: Int64Array
    row_offsets: Int64Array
    row_strides: Int64Array
    is_stored: np.ndarray[Any, np.dtype[np.bool_]]
    num_blocks: int

    def stored(self) -> GroupLayout:
        """Return the pieces that this worker stores."""
        if self.is_stored.all():
            return self
        names = ("addresses", "strides", "page_bytes", "row_offsets", "row_strides", "is_stored")
        kept = {name: getattr(self, name)[self.is_stored[:, 0]] for name in names}
        return dataclasses.replace(self, **kept)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Both sides of a worker's copies; `part_address` is that of the worker's part of row 0."""

    groups: tuple[GroupLayout, ...]
    block_size_factor: int
    part_address: int
    row_bytes: int
    num_rows: int

    def stored(self) -> BlockLayout:
        """Return what this worker stores; it loads all."""
        return dataclasses.replace(self, groups=tuple(group.stored() for group in self.groups))


def lay_out(
    kv_caches: CanonicalKVCaches,
    region: PrimaryRegion,
    *,
    block_size_factor: int = 1,
    part_offset: int = 0,
    part_bytes: int | None = None,
) -> BlockLayout:
    """Return the layout of `kv_caches` in `region`; the arguments are those of `open_handlers`.

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
    """A tensor as rows, one for each block."""

    address: int
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
    addresses, strides, sizes, row_offsets, row_strides, stored = zip(*pieces, strict=True) if pieces else [()] * 6
    return GroupLayout(
        addresses=_column(addresses),
        strides=_column(strides),
        page_bytes=_column(sizes),
        row_offsets=_column(row_offsets),
        row_strides=_column(row_strides),
        is_stored=_column(stored).astype(np.bool_),
        num_blocks=min(each.num_blocks for each in [rows[ref.tensor_idx] for ref in refs] or rows),
    )


def offloaded_bytes(ref: CanonicalKVCacheRef) -> int:
    """Return the bytes that a ref has of a device block in a row."""
    return ref.page_size_bytes if ref.mapping is None else ref.mapping.canonical_page_size_bytes


def _pieces_of(ref: CanonicalKVCacheRef) -> Iterator[tuple[int, int, int]]:
    """Yield of each piece its offset in the worker's page, its offset in the offloaded page, and its bytes."""
    if ref.mapping is None:
        yield 0, 0, ref.page_size_bytes
        return
    for run in ref.mapping.runs:
        for number in range(run.num_fragments):
            local, canonical = number * run.local_stride, number * run.canonical_stride
            yield run.local_offset + local, run.canonical_offset + canonical, run.fragment_size


def _column(values: Sequence[int]) -> Int64Array:
    return np.array(values, dtype=np.int64).reshape(-1, 1)
