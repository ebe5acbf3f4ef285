"""Least recently used, by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered_kv.cpu.backend import CPUBlock, RequestChain
from tiered_kv.cpu.policies.base import CachePolicy, ChainOrder


class LRUPolicy(CachePolicy):
    """Evicts from the request that was used least recently, its tail first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._order = ChainOrder()

    def __len__(self) -> int:
        return len(self._order)

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        chain.refresh()

    def add(self, blocks: Iterable[CPUBlock]) -> None:
        self._order.add(blocks)

    def remove(self, blocks: Iterable[CPUBlock]) -> None:
        self._order.discard_all(blocks)

    def use(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        order = self._order
        chain.refresh()
        if all(block.chain is chain for block in blocks):
            return
        evictable = [block for block in blocks if block.ref_cnt <= 0 and order.discard(block)]
        chain.take(blocks)
        order.add(evictable)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[CPUBlock] | None:
        if count > len(self._order):
            return None
        victims = self._order.pop(count, step, spare)
        if len(victims) < count:
            self._order.add(victims)
            return None
        return victims

    def end_step(self) -> None:
        self._order.end_step()
