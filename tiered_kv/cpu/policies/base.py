"""The contract of an eviction policy, and an order of blocks by the request that used them last."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import attrgetter

from tiered_kv.cpu.backend import CPUBlock, RequestChain

QUEUE_SPARE = 64
"""Entries of a queue that may be out of date, besides one for each chain."""
_position_of = attrgetter("position")


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


class _Stack:
    """The evictable blocks of one chain, by block_id; sorted by position only when a pop finds them out of order."""

    __slots__ = ("blocks", "is_sorted", "top")

    def __init__(self) -> None:
        self.blocks: dict[int, CPUBlock] = {}
        self.top = -1
        self.is_sorted = True

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

    `RequestChain.last_use` says which chain that is. A block that becomes evictable, because its store or its last read
    has ended, changes nothing of that.

    A request that shares its head with a later one, and continues without naming these blocks, has a tail that is more
    recent than its head. Engines name all blocks when they schedule a request, which puts them in order again.

    Owned by the manager's thread.
    """

    def __init__(self) -> None:
        self._stacks: dict[RequestChain, _Stack] = {}
        # A heap by last use. An entry is out of date if its chain was used later, or has no blocks any more.
        self._queue: list[tuple[int, int, RequestChain]] = []
        self._numbers = itertools.count()  # chains are not compared
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
                stack = self._stacks.get(chain) or self._begin(chain)
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
        stack = self._stacks.get(chain) if chain is not None else None
        if stack is not None and stack.blocks.get(block.block_id) is block:
            del stack.blocks[block.block_id]
            if not stack.blocks:
                assert chain is not None
                del self._stacks[chain]
        elif block.block_id in self._held:
            del self._held[block.block_id]
        else:
            return False
        self._size -= 1
        return True

    def discard_all(self, blocks: Iterable[CPUBlock]) -> None:
        """Remove those of `blocks` that are in the order; cheaper than `discard` of each."""
        chain: RequestChain | None = None
        stack: dict[int, CPUBlock] | None = None
        for block in blocks:
            if block.chain is not chain:
                if not stack and chain is not None:
                    self._stacks.pop(chain, None)
                chain = block.chain
                found = self._stacks.get(chain) if chain is not None else None
                stack = None if found is None else found.blocks
            row = block.block_id
            if stack and stack.get(row) is block:
                del stack[row]
                self._size -= 1
            elif row in self._held:
                del self._held[row]
                self._size -= 1
        if not stack and chain is not None:
            self._stacks.pop(chain, None)

    def oldest(self) -> RequestChain | None:
        """Return the least recently used chain, or None if the order is empty."""
        queue = self._queue
        while queue:
            last_use, _, chain = queue[0]
            if chain not in self._stacks:
                heapq.heappop(queue)
            elif chain.last_use != last_use:
                heapq.heapreplace(queue, (chain.last_use, next(self._numbers), chain))
            else:
                return chain
        return None

    def depth(self, chain: RequestChain) -> int:
        """Return the position of a chain's deepest block; -1 if it has none here."""
        stack = self._stacks.get(chain)
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
        stack = self._stacks[chain]
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
            del self._stacks[chain]
        self._size -= len(popped)
        return popped

    def end_step(self) -> None:
        """Put back the blocks that were set aside."""
        if self._held:
            held, self._held = self._held, {}
            self._size -= len(held)
            self.add(held.values())

    def _begin(self, chain: RequestChain) -> _Stack:
        if len(self._queue) > 2 * len(self._stacks) + QUEUE_SPARE:
            self._queue = [(each.last_use, next(self._numbers), each) for each in self._stacks]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (chain.last_use, next(self._numbers), chain))
        stack = self._stacks[chain] = _Stack()
        return stack
