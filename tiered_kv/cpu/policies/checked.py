"""Checks of a third-party policy: its answers decide which rows are overwritten.

`PrimaryRows` wraps such a policy, and calls it on the scheduler's thread. After the first wrong answer, lru replaces
the policy for good. So no answer evicts a row that a transfer uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from tiered_kv.cpu.backend import CPUBlock, RequestChain
from tiered_kv.cpu.policies import CachePolicy
from tiered_kv.cpu.policies.recency import LRUPolicy

_log = logging.getLogger(__name__)


def checked_policy(policy: CachePolicy, num_blocks: int) -> CachePolicy:
    """Return a policy that checks `policy`, or `policy` itself if it is built in."""
    is_built_in = type(policy).__module__.startswith(f"{__package__}.")
    return policy if is_built_in else CheckedPolicy(policy, num_blocks)


class CheckedPolicy(CachePolicy):
    """Calls `inner` until it raises, or breaks its contract; from then on `lru` decides. Owned by the manager's thread.

    `inner` gets copies of all lists, since the manager relies on the order of its own lists.
    """

    def __init__(self, inner: CachePolicy, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.inner = inner
        self._is_replaced = False
        self.failure = ""
        """Why lru replaced the third-party policy; empty while that policy is used."""
        self._held: dict[int, CPUBlock] = {}
        """The evictable blocks, by block_id."""

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        self._call("admit", blocks, chain)

    def add(self, blocks: Iterable[CPUBlock]) -> None:
        added = list(blocks)
        self._call("add", added)
        self._held.update((block.block_id, block) for block in added)

    def remove(self, blocks: Iterable[CPUBlock]) -> None:
        removed = list(blocks)
        chains = [block.chain for block in removed]
        self._call("remove", removed)
        for block, chain in zip(removed, chains, strict=True):
            block.chain = chain  # as before the call: a pinned block without a chain counts as forgotten
            self._held.pop(block.block_id, None)

    def clear(self, blocks: Iterable[CPUBlock]) -> dict[Any, Any]:  # Any: the policy's own
        self._call("clear", list(blocks))
        self._held = {}
        return {}

    def use(self, blocks: Sequence[CPUBlock], chain: RequestChain) -> None:
        self._call("use", blocks, chain)
        if not all(block.chain is chain and isinstance(block.position, int) for block in blocks):
            for position, block in enumerate(blocks):
                block.chain, block.position = chain, position
            self._replace("use", ValueError("it has not set the chain and the position of each block"))
            self.inner.use(blocks, chain)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[CPUBlock] | None:
        victims: list[CPUBlock] | None = None
        if not self._is_replaced:
            try:
                self.inner.now_s = self.now_s
                victims = self._checked(self.inner.evict(count, step, spare), count, step)
            except Exception as error:
                self._replace("evict", error)
        if self._is_replaced:
            victims = self.inner.evict(count, step, spare)
        for block in victims or ():
            del self._held[block.block_id]
        return victims

    def end_step(self) -> None:
        self._call("end_step")

    def _call(self, method: str, blocks: Sequence[CPUBlock] | None = None, *arguments: RequestChain) -> None:
        try:
            self.inner.now_s = self.now_s
            getattr(self.inner, method)(*(() if blocks is None else (list(blocks),)), *arguments)
        except Exception as error:
            if self._is_replaced:
                raise
            self._replace(method, error)
            self._call(method, blocks, *arguments)

    def _checked(self, victims: Sequence[CPUBlock] | None, count: int, step: int) -> list[CPUBlock] | None:
        """Return the blocks that `inner.evict` chose; raise ValueError if one must not be evicted: a transfer or a
        request of this step may need it."""
        if victims is None:
            if len(self.inner) != len(self._held):
                raise ValueError(f"it returned None, and holds {len(self.inner)} blocks of {len(self._held)}")
            return None
        checked: dict[int, CPUBlock] = {}
        for block in victims:
            if self._held.get(block.block_id) is not block or block.step == step:
                raise ValueError("it returned a block that it must not evict now")
            checked[block.block_id] = block
        if not len(checked) == len(victims) == count:
            raise ValueError(f"it returned {len(checked)} different blocks, not {count}")
        return list(checked.values())

    def _replace(self, method: str, error: Exception) -> None:
        name = f"{type(self.inner).__module__}:{type(self.inner).__qualname__}"
        _log.error("the eviction policy %s is replaced by lru, because of its %s", name, method, exc_info=error)
        self._is_replaced = True
        self.failure = f"{method} raised {type(error).__name__}: {error}"
        self.inner = LRUPolicy(self.num_blocks)
        self.inner.add(self._held.values())
