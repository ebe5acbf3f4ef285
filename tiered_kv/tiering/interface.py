"""The contract of a manager, for engines and programs. A stack's manager and the client of a host's cache implement it.

An engine's scheduler calls `CacheManager`, on one thread. A program's `put` and `get` call `CalledManager`, on several
threads under one lock. What must stay true: no call but `shutdown` waits, and a lookup answers True only for a block
that can be loaded now.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence

from tiered_kv.base import OffloadingManager, OffloadKey, ReqContext
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import CounterView
from tiered_kv.received import Received
from tiered_kv.tiering.pace import EngineCost


class CacheManager(OffloadingManager):
    """The manager that an engine calls: an `OffloadingManager` with secondary tiers, its own or a host's.

    All methods belong to one thread, the scheduler's, unless they say otherwise. Only `shutdown` waits.

    Attributes:
        cost: The engine's cost of computing. An engine that measures the cost keeps it up to date.
        registry: The manager's counts; any thread may take a snapshot of it.
    """

    cost: EngineCost
    registry: Registry

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Blocks that the primary tier has room for; 0 while a host's server is away."""

    @property
    def has_unsent(self) -> bool:
        """Whether messages to a host's server wait to be sent at the end of a step."""
        return False

    @abstractmethod
    def has_row(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether the primary tier has a block, ready or in state writing."""

    @abstractmethod
    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return `lookup` of each key, in order; cheaper than one call for each key."""

    @abstractmethod
    def prefetch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Begin to promote the prefix `keys`, up to its first miss, for a request that will need it.

        The prefetch ends when the request loads blocks or ends, or by `end_prefetch`.
        """

    @abstractmethod
    def end_prefetch(self, req_context: ReqContext) -> None:
        """End the prefetch of a request: from now on it looks its blocks up itself."""

    @abstractmethod
    def ask_known(self, keys: Callable[[], Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Ask which blocks are stored already. `keys` returns the blocks that the engine has itself and will offer."""

    @abstractmethod
    def expect(self, blocks: int, req_context: ReqContext, *, before: int = 0, is_whole: bool = False) -> None:
        """Announce that a request will look up at most `blocks` blocks, after `before` blocks that the engine has.

        Then no lookup asks a tier that would deliver the blocks later than the engine computes them. If only the first
        blocks come in time, only these are loaded. With `is_whole` all blocks are loaded or none: for an engine with
        several KV cache groups, or with a sliding window only.
        """

    @abstractmethod
    def promoting(self, req_context: ReqContext) -> int:
        """Return how many blocks are promoted now for a request. If it waits only for these, lookups find no others."""

    @abstractmethod
    def hit_tier(self, key: OffloadKey, req_context: ReqContext) -> str:
        """Return the tier that a block was promoted from for this request, or "cpu"."""

    @abstractmethod
    def received(self, req_context: ReqContext) -> Received:
        """Return what a request that has not ended got until now, without `missed_blocks`."""

    @abstractmethod
    def poll(self) -> None:
        """Process ended jobs and passed deadlines; part of `on_schedule_end`."""

    @abstractmethod
    def outdate(self, req_context: ReqContext) -> None:
        """Treat a request as one from before the last reset: its caller began before that reset."""

    def counters(self) -> CounterView:
        """Return all counts by tier, a secondary tier's own `stats` under "tier". Any thread may call."""
        return CounterView(self.registry.snapshot())

    @abstractmethod
    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Wait for transfers up to `timeout_s`, and release everything; a second call does nothing."""


class CalledManager(CacheManager):
    """Further methods, for a program's `put` and `get`. Several threads call, under one lock."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The number of resets."""

    @property
    @abstractmethod
    def has_tiers_below(self) -> bool:
        """Whether there are secondary tiers."""

    @property
    @abstractmethod
    def jobs_in_flight(self) -> int:
        """Jobs that a tier has not reported yet, including expired ones."""

    @abstractmethod
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return `lookup` of each key up to the first block that no tier has.

        For later blocks that a tier has, the answer is None, and they are not promoted. Later missing blocks are looked
        up too, to count and explain them. While a block has no room, in memory or in a tier's budget, the answer is
        None. The manager does not limit this wait. Meanwhile the request holds no block that others need to go on.
        """

    @abstractmethod
    def let_go(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Hold ready blocks no longer for a request that does not load these blocks."""

    @abstractmethod
    def contains_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return for each block whether a tier has it, None while a tier has not answered. Nothing is promoted."""

    @abstractmethod
    def stores_nothing_of(self, req_context: ReqContext) -> bool:
        """Return whether no block of a request is stored: it began before a reset, or has the hint `skip: store`."""

    @abstractmethod
    def is_outdated(self, req_context: ReqContext) -> bool:
        """Return whether a request began before a reset."""

    @abstractmethod
    def has_kept(self, req_context: ReqContext) -> bool:
        """Return whether a secondary tier has taken each block of a request: later blocks may evict earlier ones."""

    @abstractmethod
    def spare_own(self, req_context: ReqContext) -> None:
        """Evict no block of a request for its later blocks: without secondary tiers the block would be lost."""

    @abstractmethod
    def reserve_stores(self, num_blocks: int) -> bool:
        """Reserve store budget in every tier; return False if a tier has too little now.

        The caller releases the budget just before the store's `complete_store`.
        """

    @abstractmethod
    def release_stores(self, num_blocks: int) -> None:
        """Release budget that `reserve_stores` has reserved."""
