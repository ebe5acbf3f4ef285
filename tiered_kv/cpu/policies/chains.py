"""Recency by request: the order that `lru`, `arc` and `s3fifo` are built from.

In an LRU list of blocks, each use of a request would have to move all of its blocks, so that the tail goes before the
head. Here the list contains *chains*, one for each request. A chain is a stack of the blocks that its request was the
last to use. Eviction pops from the top of the least recently used chain: the tail of its prefix. So storing, using and
evicting cost O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tiered_kv.cpu.backend import CPUBlock, RequestChain


class _Stack:
    """The evictable blocks of one chain by position; sorted only when a pop finds them out of order."""

    __slots__ = ("blocks", "is_sorted", "top")

    def __init__(self) -> None:
        self.blocks: dict[int, CPUBlock] = {}
        self.top = -1
        self.is_sorted = True


class ChainOrder:
    """Evictable blocks: the least recently used chain first, and within a chain the tail first.

    Owned by the manager's thread.
    """

    def __init__(self) -> None:
        self._stacks: OrderedDict[RequestChain, _Stack] = OrderedDict()
        self._held: dict[
            int, CPUBlock
        ] = {}  # set aside in this step; by block_id, since ctypes structures have no hash
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, blocks: Iterable[CPUBlock]) -> None:
        """Add blocks that are not in the order; their chains become the most recently used."""
        stacks = self._stacks
        chain: RequestChain | None = None
        stack = _Stack()
        for block in blocks:
            if block.chain is not chain:
                chain = block.chain
                assert chain is not None
                found = stacks.get(chain)
                if found is None:
                    found = stacks[chain] = _Stack()
                else:
                    stacks.move_to_end(chain)
                stack = found
            position = block.position
            stack.blocks[position] = block
            if position > stack.top:
                stack.top = position
            else:
                stack.is_sorted = False
            self._size += 1

    def discard(self, block: CPUBlock) -> bool:
        """Remove a block if it is in the order, and return whether it was."""
        chain = block.chain
        stack = self._stacks.get(chain) if chain is not None else None
        if stack is not None and stack.blocks.get(block.position) is block:
            del stack.blocks[block.position]
            if not stack.blocks:
                assert chain is not None
                del self._stacks[chain]
        elif block.block_id in self._held:
            del self._held[block.block_id]
        else:
            return False
        self._size -= 1
        return True

    def refresh(self, chain: RequestChain) -> None:
        """Make a chain the most recently used."""
        if chain in self._stacks:
            self._stacks.move_to_end(chain)

    def oldest(self) -> RequestChain | None:
        """Return the least recently used chain, or None if the order is empty."""
        return next(iter(self._stacks), None)

    def pop(self, count: int, step: int, spare: RequestChain | None) -> list[CPUBlock]:
        """Remove and return up to `count` blocks in the order of eviction, none of the chain `spare`.

        Blocks with this `step` are set aside until the step ends, so each is visited once a step at most. `spare` must
        be the most recently used chain.
        """
        popped: list[CPUBlock] = []
        stacks = self._stacks
        while len(popped) < count and stacks:
            chain, stack = next(iter(stacks.items()))
            if chain is spare:
                break
            blocks = stack.blocks
            if not stack.is_sorted:
                blocks = stack.blocks = dict(sorted(blocks.items()))
                stack.is_sorted = True
            while blocks and len(popped) < count:
                _, block = blocks.popitem()
                if block.step == step:
                    self._held[block.block_id] = block
                else:
                    popped.append(block)
            if blocks:
                stack.top = next(reversed(blocks))
            else:
                del stacks[chain]
        self._size -= len(popped)
        return popped

    def restore(self, blocks: Sequence[CPUBlock]) -> None:
        """Put back blocks that `pop` removed, in their order, as the next to be evicted."""
        for block in reversed(blocks):
            self.add((block,))
            assert block.chain is not None
            self._stacks.move_to_end(block.chain, last=False)

    def end_step(self) -> None:
        """Put back the blocks that were set aside."""
        if self._held:
            held, self._held = self._held, {}
            self._size -= len(held)
            self.add(held.values())
