"""SGLang's host pools: the places of a page's parts in memory.

A page is the KV cache of some tokens, or a recurrent state. A host pool keeps it in one or more runs of bytes: one for
keys and one for values; in a layer-first layout, one for each layer; in a Mamba pool, one for each kind of state. Each
run is a *part*, with a number within its page, and is a block of a tier.

`TieredKVHiCache` makes a `PagePool` on the scheduler's thread, and SGLang's threads use it. The places of the parts
must not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.errors import ConfigError

_BUFFERS = (
    "kv_buffer",
    "k_buffer",
    "v_buffer",
    "index_k_buffer",
    "index_k_scale_buffer",
    "index_k_with_scale_buffer",
    "temporal_buffer",
    "conv_buffer",
)
"""Attributes in which host pools have their tensors."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a pool's pages that have one size.

    Args:
        name: Name of the parts' directory: the pool's name, with a number if the pool has several sizes.
        part_bytes: Size of each part.
        numbers: Numbers of the parts within a page.
        address: Where the memory begins that has all of the parts.
        memory_bytes: Size of that memory. It may have holes that are not mapped.
        pool_bytes: Bytes of the parts in all pages of the pool.
    """

    name: str
    part_bytes: int
    numbers: tuple[int, ...]
    address: int
    memory_bytes: int
    pool_bytes: int


class PagePool:
    """A host pool of SGLang, by pages and parts. Any thread may use it.

    Args:
        name: SGLang's name for it, such as "kv" or "mamba".
        pool: SGLang's `HostKVCache`.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name, self.pool = name, pool
        self.page_slots = int(pool.page_size)
        """How many of SGLang's indices a page takes."""
        self.tensors = _tensors_of(pool)
        """The pool's memory. SGLang drops it when the pool is destroyed; this keeps it."""
        pages = int(pool.size) // int(pool.page_size)
        addresses, self.sizes = self._places(torch.arange(self.page_slots))
        last, _ = self._places(torch.arange(self.page_slots) + (pages - 1) * self.page_slots)
        places = [self._tensor_of(number, addresses, last) for number in range(len(self.sizes))]
        sizes = sorted(set(self.sizes), reverse=True)
        self.parts = []
        for index, size in enumerate(sizes):
            numbers = tuple(number for number, each in enumerate(self.sizes) if each == size)
            tensors = [places[number] for number in numbers]
            address = min(tensor.data_ptr() for tensor in tensors)
            end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors)
            part_name = f"{name}-{index}" if len(sizes) > 1 else name
            self.parts.append(Parts(part_name, size, numbers, address, end - address, pages * size * len(numbers)))

    def keys(self, parts: Parts, page_keys: Sequence[str]) -> list[OffloadKey]:
        """Return the keys of `parts`, page by page. `page_keys` are SGLang's hashes, in hexadecimal."""
        hashes = [bytes.fromhex(key) for key in page_keys]
        return [make_offload_key(each, number) for each in hashes for number in parts.numbers]

    def offsets(self, parts: Parts, host_indices: torch.Tensor) -> list[int]:
        """Return the offsets of `parts` in their memory, in bytes. `host_indices` are the indices of whole pages."""
        addresses, _ = self.pool.get_page_buffer_meta(host_indices)
        begin, count = parts.address, len(self.sizes)
        return [
            addresses[page + number] - begin for page in range(0, len(addresses), count) for number in parts.numbers
        ]

    def _places(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of the parts of some pages."""
        try:
            addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        # Pools without fixed places raise these.
        except (NotImplementedError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"SGLang's host pool '{self.name}' ({type(self.pool).__name__}, layout {self.pool.layout}) has no "
                f"fixed places for its pages: {error}; use --hicache-mem-layout page_first or page_first_direct, if "
                "this model can"
            ) from error
        return list(addresses), list(sizes)

    def _tensor_of(self, number: int, first: Sequence[int], last: Sequence[int]) -> torch.Tensor:
        size = self.sizes[number]
        for tensor in self.tensors:
            begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            if begin <= first[number] and last[number] + size <= end and first[number] <= last[number]:
                return tensor
        raise ConfigError(
            f"part {number} of a page of SGLang's host pool '{self.name}' ({type(self.pool).__name__}, layout "
            f"{self.pool.layout}) is in no known memory"
        )


def _tensors_of(pool: Any) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for name in _BUFFERS:
        for tensor in _flat(getattr(pool, name, None)):
            found.setdefault(tensor.data_ptr(), tensor)
    return list(found.values())


def _flat(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.nbytes:
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
