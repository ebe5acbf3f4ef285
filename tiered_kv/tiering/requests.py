"""The state of each request, and the limits of the manager."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.metrics.history.ledger import RequestLog
from tiered_kv.reasons import Fate, Reason
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.pace import EngineCost

PAUSE_S_MAX = 1.0
"""The most that counts as waiting between two lookups: an engine that does not ask for longer does not wait."""


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """The limits of all secondary tiers together."""

    promotion_blocks_max: int | None = None
    """Primary blocks that may be in promotion or held for requests at one time; default half of the primary tier."""
    hold_s: float = 10.0  # for a request that does not load a promoted block
    wait_max_s: float = 30.0
    """How long a request may be answered None until it loads a block that it waited for. After that, blocks that are
    not ready are misses for it until it ends. Its end waits as long for its last stores."""
    requests_max: int = 100_000  # whose state is kept; the oldest is forgotten first


@dataclass(slots=True, eq=False)
class LookupState:
    """A request's lookups in the tiers, and how long it has waited. `Search` writes most fields."""

    misses_all: Fate | None = None
    """Why all its lookups are misses: its hint, a reset since it began, or that it has waited as long as it may."""
    waited_s: float = 0.0
    """How long it has waited since it last loaded a block that was promoted for it."""
    asked_s: float = math.inf
    """When it last asked; infinite before its first answer None, and after it has loaded promoted blocks."""
    is_asking: bool = True
    """Whether the request itself looks up, and not its prefetch."""
    turn: object = None
    """The turn of the search in which it last asked."""
    waiting_turn: object = None
    """The turn of the search in which it was last answered None."""
    unanswered: dict[tuple[OffloadKey, GuardedTier], float] = field(default_factory=dict)
    """Since when (seconds) a tier has not answered for a key."""
    denied: dict[OffloadKey, int] = field(default_factory=dict)
    """For the anonymous request: the number of the last tier that has answered False, since the request waits."""
    failed: dict[OffloadKey, set[GuardedTier]] = field(default_factory=dict)
    """Tiers that it does not ask for a key any more: they failed to load it, or would load it too late."""
    timed_out: dict[GuardedTier, Fate] = field(default_factory=dict)
    """Tiers that it does not ask any more: their answer did not come, or would not come, in time; and why."""
    blocks_before: int | None = None
    """Blocks of its prefix that the engine has; None if unknown."""
    is_whole: bool = False
    """Whether a part of a load is of no use."""
    load_room: dict[GuardedTier, int] = field(default_factory=dict)
    """How many more blocks of a tier arrive before the engine would have computed them, if not all do."""

    def count_wait(self, now_s: float, wait_max_s: float) -> None:
        """Add the time since it last asked; from `wait_max_s` on, it waits for nothing."""
        self.waited_s += min(now_s - self.asked_s, PAUSE_S_MAX)
        self.asked_s = now_s
        if self.waited_s >= wait_max_s:
            self.misses_all = Fate.TOO_LATE
            self.unanswered.clear()

    def end_wait(self) -> None:
        """Note that the request has received blocks that it waited for."""
        self.waited_s, self.asked_s = 0.0, math.inf

    def keep_unanswered(self, keys: Collection[OffloadKey]) -> None:
        """Wait for no answers but those for `keys`."""
        self.unanswered = {asked: since_s for asked, since_s in self.unanswered.items() if asked[0] in keys}


@dataclass(slots=True, eq=False)
class LoadState:
    """The promotions of a request. `Promotions` writes it."""

    promoting: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks that are being promoted for it, in the order of its prefix."""
    held: dict[OffloadKey, CPUBlock] = field(default_factory=dict)
    """Promoted blocks, pinned until it loads them, or until `held_until_s`."""
    held_until_s: float = 0.0
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """The tier that each promoted block came from."""
    waits_for_room: bool = False
    """Whether it waits while room is lacking for a block, as a program's call does. For an engine that is a miss."""
    lacking: tuple[OffloadKey, GuardedTier | None] | None = None
    """The first block since its last lookup for which room was lacking: in a tier's load budget, or rows (None)."""
    is_cut: bool = False
    """Whether blocks of its prefetch would have come too late: those behind them are not looked up ahead."""


@dataclass(slots=True, eq=False)
class StoreState:
    """The stores of a request, and what tiers want when it ends. The manager writes it."""

    pending: int = 0
    """Keys between `prepare_store` and `complete_store`."""
    request_level: tuple[GuardedTier, ...] = ()
    """Tiers that want all of its blocks when it ends."""
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    """All keys of the request, in order; empty without `request_level`."""
    is_kept: bool = True
    """Whether a tier has taken each of its blocks as it was stored, so that the primary tier may evict it."""
    unready: list[OffloadKey] = field(default_factory=list)
    """Once it is finished: its keys that are being written for other requests."""

    def note(self, keys: Collection[OffloadKey]) -> None:
        """Keep keys that the request uses, if a tier wants them."""
        if self.request_level:
            self.keys.update(dict.fromkeys(keys))


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of a request, as first seen, from its first call to its end. `RequestTable` writes its own fields."""

    req_context: ReqContext
    lookups: LookupState
    cost: EngineCost
    """Cost of the request's engine, as that engine reports it. It decides loads of this engine only."""
    loads: LoadState = field(default_factory=LoadState)
    stores: StoreState = field(default_factory=StoreState)
    is_finished: bool = False
    """Whether the engine has finished it; its last stores are still in flight."""
    log: RequestLog | None = None
    """The history's log of the request; None until the request asks for blocks, and without a history."""

    def computes_sooner_than(self, guarded: GuardedTier) -> bool:
        """Return whether its engine would not wait for the tier, or for no more of its blocks."""
        return self.lookups.timed_out.get(guarded) is Fate.TOO_SLOW or self.lookups.load_room.get(guarded, 1) <= 0

    def forget_blocks(self) -> None:
        """Forget what is known of blocks after a reset."""
        self.stores = StoreState()
        self.loads.sources = {}  # the history still reads the old dictionary
        for kept in (self.lookups.failed, self.lookups.unanswered, self.lookups.denied):
            kept.clear()

    def leave_tier(self, key: OffloadKey, guarded: GuardedTier, reason: Reason) -> None:
        """Ask a tier for a key no more, and note why."""
        self.lookups.failed.setdefault(key, set()).add(guarded)
        if self.log is not None:
            self.log.failed(key, guarded.number, reason)


class RequestTable:
    """The states of at most `requests_max` requests. Owned by the manager's thread.

    Calls without a request id share one state, the *anonymous* request. It never ends, so it is forgotten twice
    `wait_max_s` after it began; then failed keys may be tried again. If it waits at that time, the next one has waited
    as long. A request whose last stores do not end is forgotten `wait_max_s` after it finished. Beyond `requests_max`
    the oldest request is forgotten. `forget` is called with each forgotten state. Requests in `outdated` load nothing.
    `cost` serves requests whose engine reports none.
    """

    def __init__(
        self,
        requests_max: int,
        wait_max_s: float,
        forget: Callable[[RequestState], None],
        clock: Callable[[], float],
        outdated: Container[str],
        cost: EngineCost,
    ) -> None:
        self._requests_max = requests_max
        self._outdated = outdated
        self._cost = cost
        self._wait_max_s = wait_max_s
        self._forget = forget
        self._clock = clock
        self.states: dict[str, RequestState] = {}
        """By request id; "" is the anonymous request."""
        self.finished: dict[RequestState, float] = {}
        """Finished requests, and until when their last stores may take; the earliest first."""
        self._anonymous_until_s = 0.0
        self.forgotten = 0

    def get(self, req_context: ReqContext) -> RequestState | None:
        """Return the state of a request; None if it is unknown."""
        return self.states.get(req_context.req_id)

    def state_of(self, req_context: ReqContext) -> RequestState:
        """Return the state of a request; create it if it is unknown."""
        req_id = req_context.req_id
        state = self.states.get(req_id)
        if state is None:
            if len(self.states) >= self._requests_max:
                oldest = next(iter(self.states.values()))
                self.pop(oldest)
                self._forget(oldest)
                self.forgotten += 1
            if not req_id:
                self._anonymous_until_s = self._clock() + 2 * self._wait_max_s
            lookups = LookupState(Fate.RESET if req_id in self._outdated else None)
            state = self.states[req_id] = RequestState(req_context, lookups, self._cost)
        return state

    def log_of(self, state: RequestState) -> RequestLog:
        """Return the history's log of a request; begin it if there is none."""
        if state.log is None:
            state.log = RequestLog(state.req_context.req_id, self._clock())
        return state.log

    def finish(self, state: RequestState) -> None:
        """Keep a finished request until its last stores have ended."""
        state.is_finished = True
        self.finished.setdefault(state, self._clock() + self._wait_max_s)

    def pop(self, state: RequestState) -> None:
        self.finished.pop(state, None)
        if self.states.get(state.req_context.req_id) is state:
            del self.states[state.req_context.req_id]

    def expire(self, now_s: float) -> None:
        """Forget the requests whose time is over; called once a step."""
        while self.finished and (finished := next(iter(self.finished.items())))[1] <= now_s:
            self.pop(finished[0])
            self._forget(finished[0])
        state = self.states.get("")
        if state is not None and now_s >= self._anonymous_until_s:
            self.pop(state)
            self._forget(state)
            before = state.lookups
            if 0 <= now_s - before.asked_s <= PAUSE_S_MAX and before.misses_all is None:
                lookups = LookupState(waited_s=before.waited_s, asked_s=before.asked_s)
                self.state_of(state.req_context).lookups = lookups
