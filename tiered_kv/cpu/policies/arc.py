"""Adaptive replacement, by request.

After N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). Blocks used by one
request (T1) and blocks used by several (T2) are in separate lists. The share of T1 adapts to the keys of evicted blocks
(B1, B2) that return.

One rule is added, because the tail of a prefix must be evicted before its head. The head may be in T2 while the tail
is in T1. A tail is never used after its head, so T2 evicts only when its oldest request is older than the oldest of T1.
For the same reason, a block that returns goes to T2 only if its request has no new block in T1: that block would be its
head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock, RequestChain
from tiered_kv.cpu.policies.base import CachePolicy
from tiered_kv.cpu.policies.chains import ChainOrder


class ARCPolicy(CachePolicy):
    """Evicts blocks used once before blocks used again, in shares that adapt to the requests."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._recent = ChainOrder()
        self._frequent = ChainOrder()
        self._recent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self._recent_target = 0.0
        self._clock = 0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        for block in blocks:
            key = block.key
            if key in recent:
                step = max(1.0, len(frequent) / len(recent))
                self._recent_target = min(self._recent_target + step, float(self.num_blocks))
                del recent[key]
            elif key in frequent:
                step = max(1.0, len(recent) / len(frequent))
                self._recent_target = max(self._recent_target - step, 0.0)
                del frequent[key]
            else:
                chain.note = True  # it has a new block in T1
                continue
            block.is_frequent = not chain.note

    def add(self, blocks: Iterable[CPUBlock]) -> None:
        self._clock += 1
        for is_frequent, group in groupby(blocks, key=lambda block: block.is_frequent):
            members = list(group)
            for block in members:
                assert block.chain is not None
                block.chain.last_use = self._clock
            (self._frequent if is_frequent else self._recent).add(members)

    def remove(self, blocks: Iterable[CPUBlock]) -> None:
        for block in blocks:
            self._discard(block)

    def use(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        self._clock += 1
        chain.last_use = self._clock
        if all(block.chain is chain for block in blocks):
            self._recent.refresh(chain)
            self._frequent.refresh(chain)
            return
        evictable = [block for block in blocks if self._discard(block)]
        for block in blocks:
            if block.chain is not chain and block.chain is not None:
                block.is_frequent = True
        chain.take(blocks)
        self.add(evictable)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[CPUBlock] | None:
        if count > len(self):
            return None
        victims: list[CPUBlock] = []
        while len(victims) < count:
            first, second = self._preference()
            # One at a time: each eviction changes which of the two lists evicts next.
            popped = first.pop(1, step, spare) or second.pop(1, step, spare)
            if not popped:
                self._frequent.restore([block for block in victims if block.is_frequent])
                self._recent.restore([block for block in victims if not block.is_frequent])
                return None
            victims += popped
        for block in victims:
            (self._frequent_ghosts if block.is_frequent else self._recent_ghosts)[block.key] = None
        self._trim_ghosts()
        return victims

    def end_step(self) -> None:
        self._recent.end_step()
        self._frequent.end_step()

    def _discard(self, block: CPUBlock) -> bool:
        return (self._frequent if block.is_frequent else self._recent).discard(block)

    def _preference(self) -> tuple[ChainOrder, ChainOrder]:
        recent, frequent = self._recent.oldest(), self._frequent.oldest()
        if recent is None or frequent is None:
            return (self._recent, self._frequent) if frequent is None else (self._frequent, self._recent)
        if len(self._recent) > self._recent_target or recent.last_use <= frequent.last_use:
            return self._recent, self._frequent
        return self._frequent, self._recent

    def _trim_ghosts(self) -> None:
        # The paper's bounds: T1 and B1 together hold at most c keys, all four lists at most 2c.
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self.num_blocks:
            self._recent_ghosts.popitem(last=False)
        room = 2 * self.num_blocks - len(self) - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > room:
            self._frequent_ghosts.popitem(last=False)
