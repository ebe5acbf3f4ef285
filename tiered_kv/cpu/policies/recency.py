"""Policies by recency: an order of blocks by the request that used them last, and lru and arc over it.

`PrimaryRows` calls them, on the scheduler's thread. An order holds evictable blocks only, never a pinned one. Of one
request, the block at the end of the prefix is evicted first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock, RequestChain
from tiered_kv.cpu.policies import CachePolicy

QUEUE_SPARE = 64
"""How many entries of a queue may be out of date, besides one for each chain."""
_position_of = attrgetter("position")


class _Stack:
    """The evictable blocks of one chain, by block_id; sorted by position only when a pop finds them out of order."""

    __slots__ = ("blocks", "is_sorted", "top")

    def __init__(self) -> None:
        self.blocks: dict[int, CPUBlock] = {}
        self.top = -1  # the largest position
        self.is_sorted = True

    def __len__(self) -> int:
        return len(self.blocks)

    def sort(self) -> None:
        if not self.is_sorted:
            self.blocks = {block.block_id: block for block in sorted(self.blocks.values(), key=_position_of)}
            self.is_sorted = True


class ChainOrder:
    """Evictable blocks: the least recently used chain first, and within a chain the tail first.

    In an LRU list of blocks, each use of a request would have to move all of its blocks, so that the tail goes before
    the head. Here the list contains *chains*, one for each request. A chain is a stack of the blocks that its request
    was the last to use. Eviction pops from the top of the least recently used chain: the tail of its prefix. So
    storing, using and evicting cost O(1) a block.

    `RequestChain.last_use` orders the chains. When a store or the last read of a block ends, the block becomes
    evictable, and the order of the chains stays.

    If a later request shares a request's head, and the earlier one continues without naming these blocks, its tail
    becomes more recent than its head. Engines name all blocks when they schedule a request, which restores the order.

    Owned by the manager's thread.
    """

    def __init__(self) -> None:
        self.stacks: dict[RequestChain, _Stack] = {}
        # A heap by last use. An entry is out of date if its chain was used later, or has no blocks any more.
        self._queue: list[tuple[int, int, RequestChain]] = []
        self._numbers = itertools.count()  # decide between entries of one use: chains have no order
        self._held: dict[
            int, CPUBlock
        ] = {}  # set aside in this step; by block_id, since ctypes structures have no hash
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, blocks: Iterable[CPUBlock]) -> None:
        """Add blocks that are not in the order."""
        chain: RequestChain | None = None
        stack = _Stack()
        for block in blocks:
            if block.chain is not chain:
                chain = block.chain
                assert chain is not None
                stack = self.stacks.get(chain) or self._begin(chain)
            position = block.position
            stack.blocks[block.block_id] = block
            if position >= stack.top:
                stack.top = position
            else:
                stack.is_sorted = False
            self._size += 1

    def discard(self, block: CPUBlock) -> bool:
        """Remove a block if it is in the order, and return whether it was."""
        chain = block.chain
        stack = self.stacks.get(chain) if chain is not None else None
        if stack is not None and stack.blocks.get(block.block_id) is block:
            del stack.blocks[block.block_id]
            if not stack.blocks:
                assert chain is not None
                del self.stacks[chain]
        elif block.block_id in self._held:
            del self._held[block.block_id]
        else:
            return False
        self._size -= 1
        return True

    def discard_all(self, blocks: Iterable[CPUBlock]) -> None:
        """Remove `blocks`, as far as they are in the order; cheaper than `discard` of each."""
        chain: RequestChain | None = None
        stack: dict[int, CPUBlock] | None = None
        for block in blocks:
            if block.chain is not chain:
                if not stack and chain is not None:
                    self.stacks.pop(chain, None)
                chain = block.chain
                found = self.stacks.get(chain) if chain is not None else None
                stack = None if found is None else found.blocks
            row = block.block_id
            if stack and stack.get(row) is block:
                del stack[row]
                self._size -= 1
            elif row in self._held:
                del self._held[row]
                self._size -= 1
        if not stack and chain is not None:
            self.stacks.pop(chain, None)

    def oldest(self) -> RequestChain | None:
        """Return the least recently used chain, or None if the order is empty."""
        queue = self._queue
        while queue:
            last_use, _, chain = queue[0]
            if chain not in self.stacks:
                heapq.heappop(queue)
            elif chain.last_use != last_use:
                heapq.heapreplace(queue, (chain.last_use, next(self._numbers), chain))
            else:
                return chain
        return None

    def depth(self, chain: RequestChain) -> int:
        """Return the position of a chain's deepest block; -1 if it has none here."""
        stack = self.stacks.get(chain)
        if stack is None:
            return -1
        stack.sort()
        return next(reversed(stack.blocks.values())).position

    def pop(self, count: int, step: int, spare: RequestChain | None) -> list[CPUBlock]:
        """Remove and return up to `count` blocks in the order of eviction, none of the chain `spare`.

        Blocks with this `step` are set aside until the step ends, so each is visited once a step at most. `spare` must
        be the most recently used chain.
        """
        popped: list[CPUBlock] = []
        while len(popped) < count and (chain := self.oldest()) is not None and chain is not spare:
            popped += self.pop_from(chain, count - len(popped), step)
        return popped

    def pop_from(self, chain: RequestChain, count: int, step: int) -> list[CPUBlock]:
        """Remove and return up to `count` blocks of a chain that has some, the deepest first."""
        popped: list[CPUBlock] = []
        stack = self.stacks[chain]
        stack.sort()
        blocks = stack.blocks
        while blocks and len(popped) < count:
            block_id, block = blocks.popitem()
            if block.step == step:
                self._held[block_id] = block
            else:
                popped.append(block)
        if blocks:
            stack.top = next(reversed(blocks.values())).position
        else:
            del self.stacks[chain]
        self._size -= len(popped)
        return popped

    def end_step(self) -> None:
        """Put back the blocks that were set aside."""
        if self._held:
            held, self._held = self._held, {}
            self._size -= len(held)
            self.add(held.values())

    def _begin(self, chain: RequestChain) -> _Stack:
        if len(self._queue) > 2 * len(self.stacks) + QUEUE_SPARE:
            self._queue = [(each.last_use, next(self._numbers), each) for each in self.stacks]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (chain.last_use, next(self._numbers), chain))
        stack = self.stacks[chain] = _Stack()
        return stack


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

    def clear(self, blocks: Iterable[CPUBlock]) -> dict[Any, Any]:  # Any: the policy's own
        stacks, self._order = self._order.stacks, ChainOrder()
        return stacks

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

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._recent = ChainOrder()  # T1
        self._frequent = ChainOrder()  # T2
        self._lists = self._recent, self._frequent
        self._recent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()  # B1
        self._frequent_ghosts: OrderedDict[OffloadKey, None] = OrderedDict()  # B2
        self._recent_target = 0.0  # blocks that T1 should have

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

    def clear(self, blocks: Iterable[CPUBlock]) -> dict[Any, Any]:  # Any: the policy's own
        recent, frequent = self._recent.stacks, self._frequent.stacks
        self._recent, self._frequent = self._lists = ChainOrder(), ChainOrder()
        return {**recent, **{(chain, "frequent"): stack for chain, stack in frequent.items()}}

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
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self.num_blocks:
            self._recent_ghosts.popitem(last=False)
        room = 2 * self.num_blocks - len(self) - len(self._recent_ghosts)
        while len(self._frequent_ghosts) > room:
            self._frequent_ghosts.popitem(last=False)
