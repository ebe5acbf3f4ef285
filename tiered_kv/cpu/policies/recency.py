"""Policies by recency: lru and arc, over orders of rows by the request that used their blocks last.

`PrimaryRows` calls them, on the scheduler's thread. They hold rows of evictable blocks only, never a pinned one. Of one
request, the block at the end of the prefix is evicted first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies import CachePolicy
from tiered_kv.cpu.policies.chain_order import ChainOrder
from tiered_kv.cpu.policies.ghosts import Ghosts
from tiered_kv.cpu.row_table import RowTable


class LRUPolicy(CachePolicy):
    """Evicts from the request that was used least recently, its tail first."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._order = ChainOrder(table)

    def __len__(self) -> int:
        return len(self._order)

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()

    def add(self, rows: Collection[int]) -> None:
        self._order.add(rows)

    def remove(self, rows: Collection[int]) -> None:
        self._order.discard(rows)

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: parts of an order
        old, self._order = self._order, ChainOrder(self.table)
        return old.remains()

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        order, chain_of = self._order, self.table.chain
        chain.refresh()
        for row in rows:
            if chain_of[row] is not chain:
                break
        else:
            return
        ref_cnt = self.table.ref_cnt
        evictable = [row for row in rows if not ref_cnt[row]]
        if evictable:
            order.discard(evictable)
        chain.take(rows, self.table)
        if evictable:
            order.add(evictable)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        if count > len(self._order):
            return None
        return self._order.pop(count, step, spare) if count else []

    def end_step(self) -> None:
        self._order.end_step()


class ARCPolicy(CachePolicy):
    """Evicts blocks used once before blocks used again, in shares that adapt to the requests: adaptive replacement.

    After N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). Blocks used by one
    request (T1) and blocks used by several (T2) are in separate lists. The share of T1 adapts to the keys of evicted
    blocks (B1, B2) that return.

    One rule is added, because the tail of a prefix must be evicted before its head. The head may be in T2 while the
    tail is in T1. A tail is never used after its head, so T2 evicts only when its oldest request is older than the
    oldest of T1. For the same reason, a block that returns goes to T2 only if its request has no new block in T1: that
    block would be its head.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._is_frequent = table.is_frequent
        self._recent_ghosts, self._frequent_ghosts = Ghosts(), Ghosts()  # B1, B2
        self._recent_target = 0.0  # blocks that T1 should have
        self._begin()

    def _begin(self) -> None:
        flags = self._is_frequent
        self._recent, self._frequent = ChainOrder(self.table, flags), ChainOrder(self.table, flags, flag=True)  # T1, T2
        self._lists = self._recent, self._frequent

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()
        recent, frequent, key_of = self._recent_ghosts, self._frequent_ghosts, self.table.key
        self._is_frequent += [False] * (len(self.table) - len(self._is_frequent))
        for row in rows:
            key, is_frequent = key_of[row], False
            if chain.last_use < 0:  # an `OldChain`: no request asks for the block, so its return says nothing
                recent.discard(key)
                frequent.discard(key)
            elif recent.discard(key):
                step = max(1.0, len(frequent) / (len(recent) + 1))
                self._recent_target = min(self._recent_target + step, float(self.num_blocks))
                is_frequent = not chain.note
            elif frequent.discard(key):
                step = max(1.0, len(recent) / (len(frequent) + 1))
                self._recent_target = max(self._recent_target - step, 0.0)
                is_frequent = not chain.note
            else:
                chain.note = True  # it has a new block in T1
            self._is_frequent[row] = is_frequent

    def add(self, rows: Collection[int]) -> None:
        for order, of_order in self._by_order(rows):
            order.add(of_order)

    def remove(self, rows: Collection[int]) -> None:
        for order, of_order in self._by_order(rows):
            order.discard(of_order)

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: parts of orders
        remains = [*self._recent.remains(), *self._frequent.remains()]
        self._begin()
        return remains

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()
        chain_of = self.table.chain
        moved = [row for row in rows if chain_of[row] is not chain]
        if not moved:
            return
        ref_cnt = self.table.ref_cnt
        evictable = [row for row in rows if not ref_cnt[row]]
        self.remove(evictable)
        for row in moved:
            if chain_of[row] is not None:
                self._is_frequent[row] = True
        chain.take(rows, self.table)
        self.add(evictable)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        if count > len(self):
            return None
        victims: list[int] = []
        while len(victims) < count and (chosen := self._choose(spare)) is not None:
            order, chain, most = chosen
            victims += order.pop_from(chain, min(most, count - len(victims)), step)
        for order in self._lists:
            order.end_pop()
        if len(victims) < count:
            self.add(victims)
            return None
        key_of, is_frequent = self.table.key, self._is_frequent
        for row in victims:
            (self._frequent_ghosts if is_frequent[row] else self._recent_ghosts).add(key_of[row])
        self._trim_ghosts()
        return victims

    def end_step(self) -> None:
        self._recent.end_step()
        self._frequent.end_step()

    def heat(self, row: int) -> tuple[float, float]:
        _, last_use = super().heat(row)
        has_excess = len(self._recent) > self._recent_target  # then T1 evicts first
        return float(has_excess and row < len(self._is_frequent) and self._is_frequent[row]), last_use

    def _by_order(self, rows: Collection[int]) -> list[tuple[ChainOrder, Collection[int]]]:
        """Return the rows of each list, in their order."""
        is_frequent = self._is_frequent
        frequent = [row for row in rows if is_frequent[row]]
        if not frequent or len(frequent) == len(rows):  # as almost always
            return [(self._lists[bool(frequent)], rows)]
        return [(self._recent, [row for row in rows if not is_frequent[row]]), (self._frequent, frequent)]

    def _choose(self, spare: RequestChain | None) -> tuple[ChainOrder, RequestChain, int] | None:
        """Return the list that evicts next, its chain, and how many blocks to evict before the next choice; or None."""
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
        # The chain has blocks in both lists, and a head that was filled in later may be in T1: the deeper block goes.
        return (other if depth > order.depth(chain) else order), chain, 1

    def _trim_ghosts(self) -> None:
        # The paper's bounds: T1 and B1 together hold at most c keys, all four lists at most 2c.
        while len(self._recent_ghosts) and len(self._recent) + len(self._recent_ghosts) > self.num_blocks:
            self._recent_ghosts.pop()
        room = 2 * self.num_blocks - len(self) - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > room:
            self._frequent_ghosts.pop()
