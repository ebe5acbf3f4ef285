"""Eviction policies of the primary tier: their contract, and a policy by its name.

`PrimaryRows` makes one and calls it, on the scheduler's thread. A policy chooses only among blocks that
the manager has added, and never contains a pinned block.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from tiered_kv.cpu.backend import CPUBlock, RequestChain
from tiered_kv.cpu.policies.found import BUILT_IN_POLICIES, LOCATION, policies
from tiered_kv.errors import ConfigError, remedy_of

__all__ = ["BUILT_IN_POLICIES", "CachePolicy", "RequestChain", "make_policy", "policies"]


class CachePolicy(ABC):
    """Decides which evictable block is evicted next. Owned by the manager's thread.

    A policy contains only blocks that may be evicted. The manager removes a block when it is pinned, and adds it again
    when its last pin is gone. So `add` does not count as a use; only `use` and `admit` do. Within a request the tail
    must be evicted before the head: a block is worthless once a block before it in its prefix is gone. This holds
    between requests too: if a later request uses a head, the older request's tail must still go before it.
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

    def clear(self, blocks: Iterable[CPUBlock]) -> dict[Any, Any]:  # Any: the policy's own
        """Remove all blocks at a reset of the cache; `blocks` are all of them. By default it removes each.

        An override that does not iterate over `blocks` lets a reset of many blocks end at once. It may return a
        dictionary that the policy does not use any more; the caller drops it in parts.
        """
        self.remove(list(blocks))
        return {}

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
        """End the step: blocks that the step protected may be evicted from now on."""
        return


def make_policy(name: str, num_blocks: int) -> CachePolicy:
    """Return a policy for `num_blocks` blocks by its name in `found.policies`, or by "module:Class".

    Raises:
        ConfigError: There is no such policy, or the class is not a `CachePolicy`.
    """
    try:
        policy: object = _load(name)(num_blocks)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # any exception that a third-party module raises, SystemExit too
        if remedy_of(error):
            raise
        raise ConfigError(
            f"the policy {name!r} cannot be made for {num_blocks} blocks: {type(error).__name__}: {error}",
            location=LOCATION,
        ) from error
    if not isinstance(policy, CachePolicy):
        raise ConfigError(f"{name!r} is not a subclass of {CachePolicy.__qualname__}", location=LOCATION)
    return policy


def _load(name: str) -> Any:  # Any: the object that the name stands for
    module_name, _, class_name = name.partition(":")
    return getattr(importlib.import_module(module_name), class_name) if class_name else policies().load(name)
