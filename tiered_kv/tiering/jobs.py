"""Jobs and requests, as the tiering manager keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.tiering.base import JobId

if TYPE_CHECKING:
    from tiered_kv.tiering.guarded import GuardedTier


@dataclass(slots=True, eq=False)
class RequestState:
    """What is remembered of a request from its first call to its end.

    Attributes:
        req_context: The request, as first seen.
        failed: Tiers that have failed on a key for this request, and so are not asked again for it.
        unanswered: Since when a tier has no answer for a key.
        waited_s: How long it has waited since it last loaded a block that was promoted for it.
        asked_s: When it asked last; infinite before its first answer None, and again after such a load.
        has_waited: Whether it has waited as long as it may. From then on what is not ready is a miss for it.
        timed_out: Tiers whose answer did not come in time; they are a miss for the rest of the request.
        promoting: Blocks that are on their way for this request.
        held: Promoted blocks, pinned for this request until it loads them.
        held_until_s: When `held` is given up.
        sources: The tier that each promoted block came from.
        wanted: Keys that `prefetch` has still to find.
        request_level: Tiers that want all of the request's blocks when it ends.
        keys: All keys of the request, in order; kept only for `request_level`.
        stores_pending: Keys between prepare_store and complete_store; kept only for `request_level`.
        is_finished: Whether the engine has finished it.
    """

    req_context: ReqContext
    failed: dict[OffloadKey, set[GuardedTier]] = field(default_factory=dict)
    unanswered: dict[tuple[OffloadKey, GuardedTier], float] = field(default_factory=dict)
    waited_s: float = 0.0
    asked_s: float = math.inf
    has_waited: bool = False
    timed_out: set[GuardedTier] = field(default_factory=set)
    promoting: set[OffloadKey] = field(default_factory=set)
    held: dict[OffloadKey, CPUBlock] = field(default_factory=dict)
    held_until_s: float = 0.0
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    wanted: list[OffloadKey] = field(default_factory=list)
    request_level: tuple[GuardedTier, ...] = ()
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    stores_pending: int = 0
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class Promotion:
    """One block on its way up.

    Attributes:
        block: Where it goes; in state writing.
        guarded: Where it comes from.
        waiters: The requests that want it.
    """

    block: CPUBlock
    guarded: GuardedTier
    waiters: list[RequestState]


@dataclass(slots=True, eq=False)
class Job:
    """A batch of blocks between the primary tier and one secondary tier.

    Attributes:
        job_id: Its name towards the tier.
        keys: The blocks, in prefix order.
        blocks: Their rows: pinned for a store, in state writing for a load. They belong to the job until the
            tier has reported it, however long that takes.
        is_promotion: Whether it is a load.
        deadline_s: When it expires.
        is_expired: Whether it has. Its blocks are then in quarantine, and its result no longer counts.
    """

    job_id: JobId
    keys: list[OffloadKey]
    blocks: list[CPUBlock]
    is_promotion: bool
    deadline_s: float
    is_expired: bool = False

    @property
    def direction(self) -> str:
        """Its direction in the counters."""
        return "load" if self.is_promotion else "store"
