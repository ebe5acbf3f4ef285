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

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock, RequestChain
from tiered_kv.cpu.policies.base import CachePolicy, ChainOrder


class ARCPolicy(CachePolicy):
    """Evicts blocks used once before blocks used again, in shares that adapt to the requests."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._recent = ChainOrder()
        self._frequent = ChainOrder()
        self._lists = self._recent, self._frequent
        self._recent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()
        self._recent_target = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        chain.refresh()
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
        for is_frequent, group in groupby(blocks, key=lambda block: block.is_frequent):
            (self._frequent if is_frequent else self._recent).add(group)

    def remove(self, blocks: Iterable[CPUBlock]) -> None:
        for block in blocks:
            self._discard(block)

    def use(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        chain.refresh()
        if all(block.chain is chain for block in blocks):
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
            chosen = self._choose(spare)
            if chosen is None:
                self.add(victims)
                return None
            order, chain, most = chosen
            victims += order.pop_from(chain, min(most, count - len(victims)), step)
        for block in victims:
            (self._frequent_ghosts if block.is_frequent else self._recent_ghosts)[block.key] = None
        self._trim_ghosts()
        return victims

    def end_step(self) -> None:
        self._recent.end_step()
        self._frequent.end_step()

    def _discard(self, block: CPUBlock) -> bool:
        return (self._frequent if block.is_frequent else self._recent).discard(block)

    def _choose(self, spare: RequestChain | None) -> tuple[ChainOrder, RequestChain, int] | None:
        """Return the list that evicts next, its chain, and after how many blocks to choose again; None if none may."""
        recent, frequent = (None if (chain := order.oldest()) is spare else chain for order in self._lists)
        excess, most = math.ceil(len(self._recent) - self._recent_target), self.num_blocks
        is_older = recent is not None and (frequent is None or recent.last_use <= frequent.last_use)
        if recent is not None and (is_older or excess > 0):
            (order, other), chain = self._lists, recent
            most = most if is_older else excess
        elif frequent is not None:
            (other, order), chain = self._lists, frequent
        else:
            return None
        depth = other.depth(chain)
        if depth < 0:
            return order, chain, most
        # Its other blocks are in the other list; one that was filled in later may be the head, and is new.
        return (other if depth > order.depth(chain) else order), chain, 1

    def _trim_ghosts(self) -> None:
        # The paper's bounds: T1 and B1 together hold at most c keys, all four lists at most 2c.
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self.num_blocks:
            self._recent_ghosts.popitem(last=False)
        room = 2 * self.num_blocks - len(self) - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > room:
            self._frequent_ghosts.popitem(last=False)
