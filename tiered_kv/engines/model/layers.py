"""What the layers of a model keep of a prompt, in bytes: of a token, of a row of the primary tier, of a whole prompt.

`architectures` makes a `KVModel` of a model's configuration, and `tiered-kv size` of numbers; `sizing` asks it. The
values are frozen, so any thread may use them. What must stay true: a row has the bytes that vLLM's groups of layers
have, since its rows are those of our stack. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes of an element, by the name of its type."""
_ROW_ALIGNMENT_BYTES: Final = 4096
_GROUP_STRETCH: Final = 1.5
"""Up to this ratio of the numbers of layers, vLLM fills up the smaller group, and does not divide the larger one."""


class Kind(StrEnum):
    """How a layer keeps what it needs of earlier tokens."""

    FULL = "full attention"
    LATENT = "latent attention (MLA)"
    WINDOW = "sliding window"
    CHUNK = "attention in chunks"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that keep the same.

    Args:
        kind: How they keep it.
        number: How many layers they are.
        heads: KV heads of a layer; a latent layer has one, which all ranks share.
        elements: Elements of a token and head, of key and value together.
        span: Tokens that a window or a chunk has.
        state_bytes: Bytes of a layer's recurrent state, over all ranks.
        name: What recurrent layers are called, such as "Mamba".
    """

    kind: Kind
    number: int
    heads: int = 1
    elements: int = 0
    span: int | None = None
    state_bytes: int = 0
    name: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.STATE:
            return f"{self.number} x {self.kind} ({self.name})"
        if self.kind is Kind.LATENT:
            return f"{self.number} x {self.kind} of {self.elements} elements"
        of_tokens = "" if self.span is None else f" of {self.span:,} tokens"
        return f"{self.number} x {self.kind}{of_tokens}, {self.heads} KV heads of {self.elements // 2}"

    def token_bytes(self, dtype: str, ranks: int) -> int:
        """Return the bytes of a token in one of the layers, over all tensor parallel ranks.

        With more ranks than heads, ranks have copies of heads. Of a latent layer each rank has the same bytes, and our
        stack keeps them once.
        """
        heads = 1 if self.kind is Kind.LATENT else max(self.heads, ranks)
        return heads * self.elements * DTYPE_BYTES[dtype]


class Group(NamedTuple):
    """A KV cache group: layers whose blocks come and go together, and the tokens of a block; None for a state."""

    kind: Kind
    span: int | None
    layers: int


@dataclass(frozen=True, slots=True)
class KVModel:
    """What a model keeps.

    Args:
        name: The model's name, for people.
        layers: Its layers, those alike together.
        dtype: The type of keys and values.
        ranks: Tensor parallel ranks.
    """

    name: str
    layers: tuple[Layers, ...]
    dtype: str
    ranks: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the layers that keep every token."""
        return sum(
            each.number * each.token_bytes(self.dtype, self.ranks)
            for each in self.layers
            if each.kind in (Kind.FULL, Kind.LATENT)
        )

    @property
    def rank_token_bytes(self) -> int:
        """Bytes of a token in these layers on each GPU; latent layers are on all."""
        return sum(
            each.number * each.token_bytes(self.dtype, self.ranks) // (1 if each.kind is Kind.LATENT else self.ranks)
            for each in self.layers
            if each.kind in (Kind.FULL, Kind.LATENT)
        )

    @property
    def window_token_bytes(self) -> int:
        """Bytes of a token in the layers that keep the last tokens only."""
        return sum(each.number * each.token_bytes(self.dtype, self.ranks) for each in self.layers if each.span)

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states."""
        return sum(each.number * each.state_bytes for each in self.layers)

    @property
    def attention_token_bytes(self) -> int:
        """The most bytes of a token in one layer with attention; 0 without any."""
        return max(each.token_bytes(self.dtype, self.ranks) for each in self.layers)

    def block_tokens(self, wanted: int) -> int:
        """Return the tokens of a block: those that are wanted, or more, until a block can hold a recurrent state."""
        state_bytes = max(each.state_bytes for each in self.layers)
        token_bytes = self.attention_token_bytes
        if not state_bytes or not token_bytes:
            return wanted
        return max(1, -(-state_bytes // (token_bytes * wanted))) * wanted

    def row_bytes(self, block_tokens: int) -> int:
        """Return the bytes of a row of the primary tier: a block of the largest group."""
        page_bytes = block_tokens * self.attention_token_bytes or max(each.state_bytes for each in self.layers)
        return row_aligned(max(group.layers for group in self.groups()) * page_bytes)

    def groups(self) -> list[Group]:
        """Return the KV cache groups as vLLM divides the layers: groups of one kind, with as many layers in each."""
        alike: dict[tuple[Kind, int | None], int] = {}
        for each in self.layers:
            alike[each.kind, each.span] = alike.get((each.kind, each.span), 0) + each.number
        least, most = min(alike.values()), max(alike.values())
        size = most if most < _GROUP_STRETCH * least else least
        return [
            Group(kind, span, size if len(alike) > 1 else number)
            for (kind, span), number in alike.items()
            for _ in range(-(-number // size))
        ]

    def prompt_rows(self, tokens: int, block_tokens: int) -> int:
        """Return the rows that a prompt takes: its whole blocks, the last window, and one recurrent state a group."""
        return sum(self._rows_of(tokens, block_tokens))

    def _rows_of(self, tokens: int, block_tokens: int) -> Iterator[int]:
        blocks = tokens // block_tokens
        for group in self.groups():
            if group.kind is Kind.STATE:
                yield min(blocks, 1)
            elif group.span is None:
                yield blocks
            else:  # a window may begin within a block
                yield min(blocks, -(-(group.span - 1) // block_tokens) + 1)


def row_aligned(row_bytes: int) -> int:
    """Return the bytes of a row in whole pages, so that disks read and write it directly."""
    return -(-row_bytes // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES
