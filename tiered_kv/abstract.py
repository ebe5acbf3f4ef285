"""The hash-list interface: whole prefixes of plain block hashes instead of single keys.

The first generation of vLLM's offloading interface (`vllm.v1.kv_offload.abstract`) has no requests, no steps and
no groups: `lookup` takes the hashes of a prompt and answers how many of them, from the first one on, can be loaded.
`tiered_kv.PrefixOffloadingManager` implements it over the manager of a stack. One thread of an engine calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from tiered_kv.base import LoadStoreSpec

BlockHash = bytes
"""Names the tokens of one block and of all blocks before it."""

__all__ = [
    "BlockHash",
    "LoadStoreSpec",
    "OffloadingEvent",
    "OffloadingManager",
    "PrepareStoreOutput",
]


@dataclass
class PrepareStoreOutput:
    """The transfer of a store that was accepted; see `tiered_kv.base.PrepareStoreOutput`."""

    block_hashes_to_store: list[BlockHash]
    store_spec: LoadStoreSpec
    block_hashes_evicted: list[BlockHash]


@dataclass
class OffloadingEvent:
    """Blocks that were stored in, or `removed` from, a medium; `block_size` is in bytes."""

    block_hashes: list[BlockHash]
    block_size: int
    medium: str
    removed: bool


class OffloadingManager(ABC):
    """Tracks offloaded blocks by hash. One thread calls; nothing waits."""

    @abstractmethod
    def lookup(self, block_hashes: Iterable[BlockHash]) -> int:
        """Return how many of `block_hashes`, from the first one on without a gap, can be loaded now."""

    @abstractmethod
    def prepare_load(self, block_hashes: Iterable[BlockHash]) -> LoadStoreSpec:
        """Pin blocks that `lookup` has just counted, and return their places, in order."""

    def touch(self, block_hashes: Iterable[BlockHash]) -> None:
        """Note that blocks are used without being loaded."""
        return

    def complete_load(self, block_hashes: Iterable[BlockHash]) -> None:
        """Release the pins of `prepare_load`."""
        return

    @abstractmethod
    def prepare_store(self, block_hashes: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        """Allocate blocks for hashes that are not stored yet; None, with nothing changed, if there is no room."""

    def complete_store(self, block_hashes: Iterable[BlockHash], success: bool = True) -> None:
        """End a store: its blocks become ready, or without `success` are freed."""
        return

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""
        return ()
