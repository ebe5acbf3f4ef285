"""Checks of a third-party policy: its answers decide which rows are overwritten.

`PrimaryRows` wraps such a policy, and calls it on the scheduler's thread. After the first wrong answer, lru replaces
the policy for good. So no answer evicts a row that a transfer uses.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies import CachePolicy
from tiered_kv.cpu.policies.recency import LRUPolicy
from tiered_kv.cpu.row_table import RowTable

_log = logging.getLogger(__name__)


def checked_policy(policy: CachePolicy, table: RowTable) -> CachePolicy:
    """Return a policy that checks `policy`, or `policy` itself if it is built in."""
    is_built_in = type(policy).__module__.startswith(f"{__package__}.")
    return policy if is_built_in else CheckedPolicy(policy, table)


class CheckedPolicy(CachePolicy):
    """Calls `inner` until it raises, or breaks its contract; from then on `lru` decides. Owned by the manager's thread.

    `inner` gets copies of all lists, since the manager relies on the order of its own lists.
    """

    def __init__(self, inner: CachePolicy, table: RowTable) -> None:
        super().__init__(table)
        self.inner = inner
        self._is_replaced = False
        self.failure = ""
        """Why lru replaced the third-party policy; empty while that policy is used."""
        self._held: dict[int, None] = {}
        """The rows of evictable blocks."""

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        self._call("admit", rows, chain)

    def add(self, rows: Collection[int]) -> None:
        self._call("add", rows)
        self._held.update(dict.fromkeys(rows))

    def remove(self, rows: Collection[int]) -> None:
        chain_of = self.table.chain
        chains = [chain_of[row] for row in rows]
        self._call("remove", rows)
        for row, chain in zip(rows, chains, strict=True):
            chain_of[row] = chain  # as before the call: a pinned block without a chain counts as forgotten
            self._held.pop(row, None)

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: the policy's own
        self._call("clear", list(rows))
        self._held = {}
        return []

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        self._call("use", rows, chain)
        chain_of = self.table.chain
        if not all(chain_of[row] is chain for row in rows):
            for position, row in enumerate(rows):
                chain_of[row], self.table.position[row] = chain, position
            self._replace("use", ValueError("it has not set the chain and the position of each block"))
            self.inner.use(rows, chain)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        victims: list[int] | None = None
        if not self._is_replaced:
            try:
                self.inner.now_s = self.now_s
                victims = self._checked(self.inner.evict(count, step, spare), count, step)
            except Exception as error:
                self._replace("evict", error)
        if self._is_replaced:
            victims = self.inner.evict(count, step, spare)
        for row in victims or ():
            del self._held[row]
        return victims

    def end_step(self) -> None:
        self._call("end_step")

    def heat(self, row: int) -> tuple[float, float]:
        try:
            first, second = self.inner.heat(row)
            return float(first), float(second)
        except Exception:  # it decides nothing but an order: no reason to replace the policy
            return super().heat(row)

    def _call(self, method: str, rows: Collection[int] | None = None, *arguments: RequestChain) -> None:
        try:
            self.inner.now_s = self.now_s
            getattr(self.inner, method)(*(() if rows is None else (list(rows),)), *arguments)
        except Exception as error:
            if self._is_replaced:
                raise
            self._replace(method, error)
            self._call(method, rows, *arguments)

    def _checked(self, victims: Sequence[int] | None, count: int, step: int) -> list[int] | None:
        """Return the rows that `inner.evict` chose; raise ValueError if one must not be evicted: a transfer or a
        request of this step may need it."""
        if victims is None:
            if len(self.inner) != len(self._held):
                raise ValueError(f"it returned None, and holds {len(self.inner)} blocks of {len(self._held)}")
            return None
        checked: dict[int, None] = {}
        for row in victims:
            if row not in self._held or self.table.step[row] == step:
                raise ValueError("it returned a block that it must not evict now")
            checked[int(row)] = None
        if not len(checked) == len(victims) == count:
            raise ValueError(f"it returned {len(checked)} different blocks, not {count}")
        return list(checked)

    def _replace(self, method: str, error: Exception) -> None:
        name = f"{type(self.inner).__module__}:{type(self.inner).__qualname__}"
        _log.error("the eviction policy %s is replaced by lru, because of its %s", name, method, exc_info=error)
        self._is_replaced = True
        self.failure = f"{method} raised {type(error).__name__}: {error}"
        self.inner = LRUPolicy(self.table)
        self.inner.add(list(self._held))
