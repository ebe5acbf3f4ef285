"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from tiered_kv.cpu.backend import CPUBlock, RequestChain


class CachePolicy(ABC):
    """Decides which evictable block is evicted next.

    A policy only ever holds blocks that may be evicted: the manager removes a block when it is pinned and adds it
    again when the last pin is gone, so pinned blocks cost eviction nothing. Within a request, the tail must go before
    the head, because a block is worthless once a block before it in its prefix is gone; `CPUBlock.chain` and
    `CPUBlock.position` tell which request used a block last, and where in its prefix.

    Args:
        num_blocks: Blocks in the primary tier, pinned ones included.

    Attributes:
        now_s: When the last request began, by a monotonic clock; 0 until a request has had hints.

    Owned by the manager's thread.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.now_s = 0.0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks held."""

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        """Note that `blocks` were allocated for new keys of the request of `chain`; they are added once written."""
        return

    @abstractmethod
    def add(self, blocks: Iterable[CPUBlock]) -> None:
        """Add `blocks`, which have become evictable."""

    @abstractmethod
    def remove(self, blocks: Iterable[CPUBlock]) -> None:
        """Remove `blocks`, which were pinned or deleted."""

    @abstractmethod
    def use(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        """Note that the request of `chain` uses `blocks`, in the order of its prefix; some may be pinned.

        Sets their `chain` and `position`.
        """

    @abstractmethod
    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[CPUBlock] | None:
        """Remove and return the `count` least valuable blocks.

        Args:
            count: How many.
            step: Blocks whose `step` is this one stay.
            spare: The request that wants the room, whose own blocks stay. The manager has just called `use` for it.

        Returns:
            The blocks, or None, with nothing changed, if there are not enough.
        """

    def end_step(self) -> None:
        """Note that blocks which were protected in this step may be evicted from now on."""
        return
