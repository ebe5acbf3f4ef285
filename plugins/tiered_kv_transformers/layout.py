"""The layout of a block in a row of the primary tier, and the copies between rows and a cache's tensors.

A block has the keys and values of some tokens, of every layer. `PrefixCache` calls `CacheLayout`, on the program's
threads. What must stay true: a copy to a row and back restores every byte.

A row is an array of shape (layers, 2, kv_heads, block_tokens, head_dim) in C order, of the cache's data type: for each
layer its keys, then its values. Tokens and head_dim come last, as in the tensors of Transformers, so that a copy moves
runs of `block_tokens * head_dim` elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiered_kv.stack.buffers import Blocks

if TYPE_CHECKING:
    import torch

NAME = "layer,kv,head,token,dim"
"""The name of a row's order of dimensions, for the namespace."""

States = Sequence["tuple[torch.Tensor, torch.Tensor]"]
"""For each layer its keys and its values, each of shape (1, kv_heads, tokens, head_dim)."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The shape of a block, and the copies between blocks and a cache's tensors. Any thread may use it.

    Args:
        layers: Layers of the model, all alike.
        kv_heads: Heads of the keys and values; with grouped-query attention fewer than those of the queries.
        head_dim: Elements of a head.
        block_tokens: Tokens of a block.
        dtype: Data type of the keys and values.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        element_bytes: int = self.dtype.itemsize
        return math.prod(self._row_shape) * element_bytes

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    def gather(self, states: States, first_block: int, blocks: int) -> Blocks:
        """Copy `blocks` blocks, at least 1, from a cache's tensors on any device.

        Returns:
            uint8 of shape (blocks, block_bytes), which shares no memory with `states`.
        """
        rows = np.empty((blocks, self.block_bytes), dtype=np.uint8)
        shaped = self._shaped(rows)
        for layer, pair in enumerate(states):
            for part, tensor in enumerate(pair):
                shaped[:, layer, part].copy_(self._blocks_of(tensor.detach(), first_block, blocks))
        return rows

    def scatter(self, rows: Blocks, states: States, first_block: int) -> None:
        """Copy blocks into a cache's tensors, all on one device.

        `rows` are uint8 of shape (blocks, block_bytes), contiguous and writable; they are not changed.
        """
        # To the device in one transfer; on the CPU this is no copy.
        shaped = self._shaped(rows).to(states[0][0].device)
        for layer, pair in enumerate(states):
            for part, tensor in enumerate(pair):
                self._blocks_of(tensor, first_block, len(rows)).copy_(shaped[:, layer, part])

    def empty_states(self, blocks: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tensors for the tokens of `blocks` blocks, with undefined content."""
        import torch

        shape = (1, self.kv_heads, blocks * self.block_tokens, self.head_dim)

        def tensor() -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=device)

        return [(tensor(), tensor()) for _ in range(self.layers)]

    def _shaped(self, rows: Blocks) -> torch.Tensor:
        """Return `rows` as a tensor of shape (blocks, layers, 2, kv_heads, block_tokens, head_dim), memory shared."""
        import torch

        return torch.from_numpy(rows).view(self.dtype).view(len(rows), *self._row_shape)

    def _blocks_of(self, tensor: torch.Tensor, first_block: int, blocks: int) -> torch.Tensor:
        """Return a view of the tensor's tokens, of shape (blocks, kv_heads, block_tokens, head_dim)."""
        begin, end = first_block * self.block_tokens, (first_block + blocks) * self.block_tokens
        shape = (self.kv_heads, blocks, self.block_tokens, self.head_dim)
        return tensor[0, :, begin:end].view(shape).transpose(0, 1)


def token_count(states: States) -> int:
    """Return how many tokens all layers have; while a model runs, its first layers have more than its last."""
    return min((tensor.shape[2] for pair in states for tensor in pair), default=0)
