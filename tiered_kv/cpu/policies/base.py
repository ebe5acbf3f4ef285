"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from tiered_kv.cpu.backend import CPUBlock, RequestChain


class CachePolicy(ABC):
    """Decides which evictable block is evicted next. Owned by the manager's thread.

    A policy contains only blocks that may be evicted. The manager removes a block when it is pinned, and adds it again
    when its last pin is gone. So `add` is no use of a block: `use` and `admit` are. Within a request the tail must go
    before the head: a block is worthless once a block before it in its prefix is gone. This holds between requests too:
    a head that a later request uses must not go before its old tail, which is still the older request's.
    `CPUBlock.chain` is the request that used a block last, and `CPUBlock.position` its position in that request's
    prefix. Positions may have gaps, and a block may be added after blocks of higher positions.

    Args:
        num_blocks: Blocks in the primary tier, pinned ones included.

    Attributes:
        now_s: When the last request began, by a monotonic clock.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.now_s = 0.0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks held."""

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        """Note that `blocks` were allocated for new keys of `chain`'s request; `add` follows when they are written.

        They are in the order of the prefix as far as it is known. Their `chain` and `position` are not set yet.
        """
        return

    @abstractmethod
    def add(self, blocks: Iterable[CPUBlock]) -> None:
        """Add `blocks`, which have become evictable."""

    @abstractmethod
    def remove(self, blocks: Iterable[CPUBlock]) -> None:
        """Remove `blocks`, which were pinned or deleted."""

    @abstractmethod
    def use(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        """Note that the request of `chain` uses `blocks`, in the order of its prefix; set their `chain` and `position`.

        Some of them may be pinned.
        """

    @abstractmethod
    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[CPUBlock] | None:
        """Remove and return the `count` least valuable blocks.

        Args:
            count: Number of blocks.
            step: The current step. Blocks with this `step` are not evicted.
            spare: The request that needs the room; its own blocks are not evicted, unless it stores and the others are
                worth more. The manager has just called `use` for it.

        Returns:
            The blocks; or None, with nothing changed, if too few can be evicted.
        """

    def end_step(self) -> None:
        """End the step: blocks that it protected may be evicted from now on."""
        return
