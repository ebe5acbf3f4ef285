"""The contract of a manager, for engines and programs: a stack's manager and the client of a host's cache have the
same.

An engine's scheduler calls `CacheManager`, on one thread. A program's `put` and `get` call `CalledManager`, of several
threads under one lock. No call but `shutdown` waits. A lookup answers True only for a block that can be loaded now.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence

from tiered_kv.base import OffloadingManager, OffloadKey, ReqContext
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import CounterView
from tiered_kv.tiering.pace import EngineCost


class CacheManager(OffloadingManager):
    """The manager that an engine calls: an `OffloadingManager` with secondary tiers, its own or a host's.

    All methods belong to one thread, the scheduler's, unless they say otherwise. Only `shutdown` waits.

    Attributes:
        cost: The cost of computing. An engine that measures it keeps it up to date.
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
        """Whether the end of a step has something to send."""
        return False

    @abstractmethod
    def has_row(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether the primary tier has a block, or is getting it."""

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
        """Ask which blocks are stored, among the blocks that the engine has itself and will offer; `keys` returns
        them."""

    @abstractmethod
    def expect(self, blocks: int, req_context: ReqContext, *, before: int = 0, is_whole: bool = False) -> None:
        """Announce that a request will look up at most `blocks` blocks, after `before` blocks that the engine has.

        Tiers that would deliver the blocks later than the engine computes them are then not asked. If only the first of
        them come in time, only these are loaded; not with `is_whole`, for an engine with several KV cache groups, or
        with a sliding window only.
        """

    @abstractmethod
    def promoting(self, req_context: ReqContext) -> int:
        """Return how many blocks are being promoted for a request. If it waits only for them, lookups find no more."""

    @abstractmethod
    def hit_tier(self, key: OffloadKey, req_context: ReqContext) -> str:
        """Return the tier that a block was promoted from for this request, or "cpu"."""

    @abstractmethod
    def poll(self) -> None:
        """Process ended jobs and passed deadlines; part of `on_schedule_end`."""

    @abstractmethod
    def outdate(self, req_context: ReqContext) -> None:
        """Treat a request as one from before the last reset: its caller began before it."""

    def counters(self) -> CounterView:
        """Return all counts by tier, a secondary tier's own `stats` under "tier". Any thread may call."""
        return CounterView(self.registry.snapshot())

    @abstractmethod
    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Wait for transfers up to `timeout_s`, and release everything; a second call does nothing."""


class CalledManager(CacheManager):
    """The methods that a program's `put` and `get` need besides; several threads call, under one lock."""

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
        """Return `lookup` of each key up to the first block that no tier has, and None for later blocks that tiers
        have.

        These blocks are not promoted. The missing ones behind it are looked up too: they are counted, and explained.
        While room is lacking for a block, in memory or in a tier's budget, the answer is None. The request then waits
        without a bound of the manager's, and holds no blocks that others would need to go on.
        """

    @abstractmethod
    def let_go(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Keep ready blocks no longer for a request that does not load them."""

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
        """Return whether secondary tiers have taken all blocks of a request; later ones may have evicted others."""

    @abstractmethod
    def spare_own(self, req_context: ReqContext) -> None:
        """Evict none of a request's blocks for its later ones: without secondary tiers they would be lost."""

    @abstractmethod
    def reserve_stores(self, num_blocks: int) -> bool:
        """Reserve store budget in every tier; return False if a tier has too little now.

        The caller releases it just before the store's `complete_store`.
        """

    @abstractmethod
    def release_stores(self, num_blocks: int) -> None:
        """Release budget of `reserve_stores`."""
