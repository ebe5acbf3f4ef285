"""The requests that the tiering manager knows, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.observe.fates import Fate
from tiered_kv.observe.ledger import Because, RequestLog
from tiered_kv.tiering.guarded import GuardedTier


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """The limits of all secondary tiers together.

    Args:
        promotion_blocks_max: Primary blocks that may be promoted, or kept for a request that waits for them, at one
            time; None for half of the primary tier.
        hold_s: How long a promoted block is kept for a request that does not load it.
        wait_max_s: How long a request may be answered None, whatever it waits for, until it loads a block that it
            waited for. At the bound, blocks that are not ready are misses for it until it ends.
        requests_max: Requests whose state is kept; the oldest is forgotten first.
    """

    promotion_blocks_max: int | None = None
    hold_s: float = 10.0
    wait_max_s: float = 30.0
    requests_max: int = 100_000


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of a request from its first call to its end.

    Attributes:
        req_context: The request, as first seen.
        failed: Tiers that have failed on a key for this request, and so are not asked again for it.
        unanswered: Since when a tier has not answered for a key.
        waited_s: How long it has waited since it last loaded a block that was promoted for it.
        asked_s: When it asked last; infinite before its first answer None, and again after such a load.
        has_waited: Whether it has reached its bound on waiting. Then blocks that are not ready are misses for it.
        timed_out: Tiers whose answer did not come in time, and why; they are a miss for the rest of the request.
        promoting: Blocks that are being promoted for this request, in the order of its prefix as far as it asks in it.
        held: Promoted blocks, pinned for this request until it loads them.
        held_until_s: When `held` is released.
        sources: The tier that each promoted block came from.
        upcoming: Keys that `prefetch` has still to look up, and `wanted`, those that no tier has answered for.
        request_level: Tiers that want all of the request's blocks when it ends.
        keys: All keys of the request, in order; kept only for `request_level`.
        stores_pending: Keys between prepare_store and complete_store; kept only for `request_level`.
        is_finished: Whether the engine has finished it.
        skips_load: Whether it wants no blocks.
        blocks_before: Blocks of its prefix that the engine has, where that told.
        turn: The turn of the search in which it asked last.
        noted: The hash of the keys of which it was last noted that it was told not to have them; 0 for the first ones.
        found: Keys of which it began to wait for a promotion since then.
        because: Why tiers are not asked, for the history.
        is_asking: Whether its lookups count: not those that `prefetch` makes.
        troubles: Why tiers that had a block did not bring it, by key and the tier's number.
        log: What the history knows of it.
    """

    req_context: ReqContext
    failed: dict[OffloadKey, set[GuardedTier]] = field(default_factory=dict)
    unanswered: dict[tuple[OffloadKey, GuardedTier], float] = field(default_factory=dict)
    waited_s: float = 0.0
    asked_s: float = math.inf
    has_waited: bool = False
    timed_out: dict[GuardedTier, Fate] = field(default_factory=dict)
    promoting: dict[OffloadKey, None] = field(default_factory=dict)
    held: dict[OffloadKey, CPUBlock] = field(default_factory=dict)
    held_until_s: float = 0.0
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    upcoming: Iterator[OffloadKey] = field(default_factory=lambda: iter(()))
    wanted: list[OffloadKey] = field(default_factory=list)
    request_level: tuple[GuardedTier, ...] = ()
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    stores_pending: int = 0
    is_finished: bool = False
    skips_load: bool = False
    blocks_before: int | None = None
    turn: object = None
    noted: int | None = None
    found: list[OffloadKey] = field(default_factory=list)
    because: Because = b""
    is_asking: bool = True
    troubles: dict[OffloadKey, dict[int, str]] = field(default_factory=dict)
    log: RequestLog | None = None

    def forget_blocks(self) -> None:
        """Forget all state about blocks that are not valid any more; running promotions do not count."""
        self.stores_pending = 0
        self.sources = {}  # the history still reads the other one
        for kept in (self.failed, self.unanswered, self.wanted, self.keys):
            kept.clear()


class RequestTable:
    """The state of each request, bounded in number.

    Calls without a request id share one state, the *anonymous* request. It has no end, so it is forgotten and begun
    anew after a while. Then failed keys may be tried again for it. Beyond `requests_max` the request seen first is
    forgotten, and `forget` called with it. Owned by the manager's thread.
    """

    def __init__(
        self,
        requests_max: int,
        anonymous_max_s: float,
        forget: Callable[[RequestState], None],
        clock: Callable[[], float],
    ) -> None:
        self._requests_max = requests_max
        self._anonymous_max_s = anonymous_max_s
        self._forget = forget
        self._clock = clock
        self.states: dict[str, RequestState] = {}
        """By request id, which is empty for the anonymous request."""
        self._anonymous_until_s = 0.0
        self.forgotten = 0

    def get(self, req_context: ReqContext) -> RequestState | None:
        """Return the state of a request, or None where it is not known."""
        return self.states.get(req_context.req_id)

    def state_of(self, req_context: ReqContext) -> RequestState:
        """Return the state of a request, and create it if it is not known."""
        req_id = req_context.req_id
        state = self.states.get(req_id)
        if state is None:
            if len(self.states) >= self._requests_max:
                oldest = next(iter(self.states.values()))
                self.pop(oldest)
                self._forget(oldest)
                self.forgotten += 1
            if not req_id:
                self._anonymous_until_s = self._clock() + self._anonymous_max_s
            state = self.states[req_id] = RequestState(req_context)
        return state

    def pop(self, state: RequestState) -> None:
        """Forget a request."""
        if self.states.get(state.req_context.req_id) is state:
            del self.states[state.req_context.req_id]

    def expire(self, now_s: float) -> None:
        """Forget the anonymous request if its time is over; once a step."""
        state = self.states.get("")
        if state is not None and now_s >= self._anonymous_until_s:
            self.pop(state)
            self._forget(state)
