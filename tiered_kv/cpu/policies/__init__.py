"""Eviction policies of the primary tier: their contract, and a policy by its name.

`PrimaryRows` makes one and calls it, on the scheduler's thread. A policy chooses only among blocks that
the manager has added, and never contains a pinned block.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies.found import BUILT_IN_POLICIES, LOCATION, policies
from tiered_kv.cpu.row_table import RowTable
from tiered_kv.errors import ConfigError, remedy_of

__all__ = ["BUILT_IN_POLICIES", "CachePolicy", "RequestChain", "RowTable", "make_policy", "policies"]


class CachePolicy(ABC):
    """Decides which evictable block is evicted next. Owned by the manager's thread.

    A policy names a block by the number of its row, and reads what belongs to the row in `table`. It contains only rows
    whose block may be evicted, so their `table.ref_cnt` is 0. The manager removes a row before its block is pinned, and
    adds it again after the last pin is gone. So `add` does not count as a use; only `use` and `admit` do. Within a
    request the tail must be evicted before the head: a block is worthless once a block before it in its prefix is
    gone. This holds between requests too: if a later request uses a head, the older request's tail must still go
    before it.
    `table.chain[row]` is the request that used a block last, and `table.position[row]` its position in that request's
    prefix. Positions may have gaps, and a row may be added after rows of higher positions.

    Args:
        table: The state of all rows, of which the policy changes only `chain` and `position`, by `RequestChain.take`.

    Attributes:
        num_blocks: Rows of the primary tier, those of pinned blocks included. With fair shares, what a tenant has of
            them; it changes.
        now_s: When the last request began, by a monotonic clock.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = table
        self.num_blocks = table.num_blocks
        self.now_s = 0.0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows held."""

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        """Note that `rows` were allocated for new keys of `chain`'s request; `add` follows when they are written.

        They are in the order of the prefix as far as it is known. Their `chain` and `position` are not set yet.
        """
        return

    @abstractmethod
    def add(self, rows: Collection[int]) -> None:
        """Add `rows`, whose blocks have become evictable."""

    @abstractmethod
    def remove(self, rows: Collection[int]) -> None:
        """Remove `rows`, whose blocks were pinned or deleted."""

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: the policy's own
        """Remove all rows at a reset of the cache; `rows` are all of them. By default it removes each.

        An override that does not iterate over `rows` lets a reset of many blocks end at once. It may return a list of
        what the policy does not use any more; the caller drops it in parts.
        """
        self.remove(list(rows))
        return []

    @abstractmethod
    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        """Note that the request of `chain` uses `rows`, in the order of its prefix; set their `chain` and `position`.

        Some of their blocks may be pinned.
        """

    @abstractmethod
    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        """Remove and return the rows of the `count` least valuable blocks.

        Args:
            count: Number of blocks.
            step: The current step. Rows with this `table.step` are not evicted.
            spare: The request that needs the room; its own blocks are not evicted, unless it stores and the others are
                worth more. The manager has just called `use` for it.

        Returns:
            The rows; or None, with nothing changed, if too few can be evicted.
        """

    def end_step(self) -> None:
        """End the step: blocks that the step protected may be evicted from now on."""
        return

    def heat(self, row: int) -> tuple[float, float]:
        """Return how hot the block of a row is: the block with the least heat is evicted first.

        Among blocks of equal heat the head of the prefix is the hottest. By default the last use of the row's request
        decides. Any thread may call, while the manager's thread changes the policy, so the answer may be out of date.
        """
        chain = self.table.chain[row]
        return 0.0, -math.inf if chain is None else chain.last_use


def make_policy(name: str, table: RowTable) -> CachePolicy:
    """Return a policy over `table` by its name in `found.policies`, or by "module:Class".

    Raises:
        ConfigError: There is no such policy, or the class is not a `CachePolicy`.
    """
    try:
        policy: object = _load(name)(table)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # any exception that a third-party module raises, SystemExit too
        if remedy_of(error):
            raise
        raise ConfigError(
            f"the policy {name!r} cannot be made for {table.num_blocks} blocks: {type(error).__name__}: {error}",
            location=LOCATION,
        ) from error
    if not isinstance(policy, CachePolicy):
        raise ConfigError(f"{name!r} is not a subclass of {CachePolicy.__qualname__}", location=LOCATION)
    return policy


def _load(name: str) -> Any:  # Any: the object that the name stands for
    module_name, _, class_name = name.partition(":")
    return getattr(importlib.import_module(module_name), class_name) if class_name else policies().load(name)
