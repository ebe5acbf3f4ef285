"""The state of each request, and the limits of the manager.

The manager, `Search`, `Prefetches` and `Promotions` read and write it, on the manager's thread. What must stay true: a
request that began before a reset stores and loads nothing. The state of a request that never ends is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.hints import HintReader, Hints
from tiered_kv.metrics.history.ledger import RequestLog
from tiered_kv.reasons import Fate, Reason
from tiered_kv.received import LoadCounts
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.order import PrefetchOrder
from tiered_kv.tiering.pace import EngineCost

STATES_MAX = 100_000
"""Limit of requests with a kept state, and of outdated ones; beyond it the oldest is forgotten."""
PAUSE_S_MAX = 1.0
"""Limit of the seconds between two lookups that count as a wait. In a longer pause the engine does not wait."""


"""More rows than there are."""
_NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """The limits of all secondary tiers together."""

    promotion_blocks_max: int | None = None
    """Primary blocks that may be in promotion or held for requests at one time; default half of the primary tier."""
    prefetch_blocks_max: int | None = None
    """Those of them that prefetch orders may hold or load; default a quarter."""
    hold_s: float = 10.0  # how long a promoted block is held for a request that does not load it
    wait_max_s: float = 30.0
    """Seconds that a request may wait, with the answer None, until it loads a block that it waited for. Later, blocks
    that are not ready are misses for it until it ends. A finished request waits as long for its last stores."""
    requests_max: int = STATES_MAX  # requests with a kept state; the oldest is forgotten first


@dataclass(slots=True, eq=False)
class LookupState:
    """A request's lookups in the tiers, and how long it has waited. `Search` writes most fields."""

    misses_all: Fate | None = None
    """Why all its lookups are misses: its hint, a reset since it began, or the end of its time to wait; or None."""
    waited_s: float = 0.0
    """Seconds that it has waited since it last loaded a block that was promoted for it."""
    waited_before_s: float = 0.0
    """Seconds that it had waited until then."""
    asked_s: float = math.inf
    """When (seconds) it last asked; infinite before its first answer None, and after it has loaded promoted blocks."""
    is_asking: bool = True
    """Whether the request itself looks up, and not its prefetch."""
    asking_pass: object = None
    """The pass of the search in which it last asked."""
    waiting_pass: object = None
    """The pass of the search in which it was last answered None."""
    unanswered: dict[tuple[OffloadKey, GuardedTier], float] = field(default_factory=dict)
    """The time in seconds since which a tier has not answered for a key."""
    denied: dict[OffloadKey, int] = field(default_factory=dict)
    """Only for the anonymous request while it waits: the number of the last tier that has answered False."""
    failed: dict[OffloadKey, set[GuardedTier]] = field(default_factory=dict)
    """Tiers that it does not ask for a key any more: they failed to load it, or would load it too late."""
    timed_out: dict[GuardedTier, Fate] = field(default_factory=dict)
    """Tiers that it does not ask any more, and why: their answer or blocks did not come, or would not come, in time."""
    blocks_before: int | None = None
    """Blocks of its prefix that the engine has; None if unknown."""
    is_whole: bool = False
    """Whether a part of a load is of no use."""
    load_room: dict[GuardedTier, int] = field(default_factory=dict)
    """How many more blocks of a tier arrive before the engine would have computed them, if not all do."""

    def count_wait(self, now_s: float, wait_max_s: float) -> None:
        """Add the time since it last asked. Once it has waited `wait_max_s`, it waits for nothing."""
        self.waited_s += min(now_s - self.asked_s, PAUSE_S_MAX)
        self.asked_s = now_s
        if self.waited_s >= wait_max_s:
            self.misses_all = Fate.TOO_LATE
            self.unanswered.clear()

    def end_wait(self) -> None:
        """Note that the request has received blocks that it waited for."""
        self.waited_before_s += self.waited_s
        self.waited_s, self.asked_s = 0.0, math.inf

    def keep_unanswered(self, keys: Collection[OffloadKey]) -> None:
        """Wait only for the answers for `keys`."""
        self.unanswered = {asked: since_s for asked, since_s in self.unanswered.items() if asked[0] in keys}


@dataclass(slots=True, eq=False)
class LoadState:
    """The promotions of a request. `Promotions` writes it."""

    promoting: dict[OffloadKey, None] = field(default_factory=dict)
    """Blocks that are being promoted for it, in the order of its prefix."""
    held: dict[OffloadKey, int] = field(default_factory=dict)
    """The rows of promoted blocks, pinned until it loads them, or until `held_until_s`."""
    held_until_s: float = 0.0
    sources: dict[OffloadKey, str] = field(default_factory=dict)
    """The tier that each promoted block came from."""
    counts: LoadCounts = field(default_factory=dict)
    """What it has loaded."""
    waits_for_room: bool = False
    """Whether it waits while room is lacking for a block, as a program's call does. For an engine that is a miss."""
    lacking: tuple[OffloadKey, GuardedTier | None] | None = None
    """The first block of its last lookup that had no room: in the load budget of a tier, or in the rows (None)."""
    order: PrefetchOrder | None = None
    """The order that it stands for: a block that a tier has gets a row only when the order loads it."""
    is_cut: bool = False
    """Whether blocks of its prefetch would have come too late: blocks behind them are not looked up ahead."""


@dataclass(slots=True, eq=False)
class StoreState:
    """The stores of a request, and the tiers that want its blocks when it ends. The manager writes it."""

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
    """The state of a request, from its first call to its end. Owned by the manager's thread."""

    req_context: ReqContext
    """The context of the request's first call."""
    lookups: LookupState
    cost: EngineCost
    """Cost of the request's engine, as that engine reports it. It decides loads of this engine only."""
    loads: LoadState = field(default_factory=LoadState)
    stores: StoreState = field(default_factory=StoreState)
    is_finished: bool = False
    """Whether the engine has finished it; its last stores are still in flight."""
    log: RequestLog | None = None
    """The history's log of the request; None until the request asks for blocks, and without a history."""
    chain: RequestChain = field(default_factory=RequestChain)
    """The request's place in the eviction order, and the positions of the request's blocks; see `chain_in`."""
    hints: Hints = _NO_HINTS

    @property
    def waited_s(self) -> float:
        """Seconds that the request has waited, in all, for tiers to answer and for blocks to come."""
        return self.lookups.waited_before_s + self.lookups.waited_s

    def chain_in(self, req_context: ReqContext) -> RequestChain:
        """Return its chain for one of its calls. A call without a request id gets a chain of its own."""
        chain = self.chain if req_context.req_id else RequestChain()
        chain.position_of = getattr(req_context, "get_offload_key_position", None)  # engines have contexts of their own
        return chain

    def computes_sooner_than(self, guarded: GuardedTier) -> bool:
        """Return whether its engine computes blocks sooner than the tier delivers them: all, or all later ones."""
        return self.lookups.timed_out.get(guarded) is Fate.TOO_SLOW or self.lookups.load_room.get(guarded, 1) <= 0

    def forget_blocks(self) -> None:
        """Forget the blocks that the request stored, promoted or looked up, after a reset."""
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

    Calls without a request id share one state, the *anonymous* request. No call ends it, so it is over after twice
    `wait_max_s`; then failed keys may be tried again. If it waits at that time, the next one keeps its waiting time. A
    request whose last stores do not end is over `wait_max_s` after it finished. Beyond `requests_max` the oldest
    request is over. The manager ends the requests that `take_over` returns. `cost` is for requests of an engine that
    reports no cost. `answer_at_once` is told whether lookups may answer without a look at the request: no request loads
    nothing.
    """

    def __init__(
        self,
        limits: ManagerLimits,
        hints: Collection[str],
        clock: Callable[[], float],
        cost: EngineCost,
        answer_at_once: Callable[[bool], None],
    ) -> None:
        self._requests_max = limits.requests_max
        self._wait_max_s = limits.wait_max_s
        self._cost = cost
        self._clock = clock
        self._hint_reader = HintReader(hints)
        self.states: dict[str, RequestState] = {}
        """The states, by request id; "" is the anonymous request."""
        self.finished: dict[RequestState, float] = {}
        """Finished requests, each with the time (seconds) at which it is over; the earliest first."""
        self._load_skippers: set[str] = set()
        """Requests that load nothing: those with the hint `skip: load`, and the outdated ones."""
        self._answer_at_once = answer_at_once
        self._outdated: dict[str, None] = {}
        """Requests that began before a reset and have not ended, oldest first. They store and load nothing."""
        self.pushed_out: list[RequestState] = []
        """Requests that are over, because `requests_max` newer requests have begun."""
        self._anonymous_until_s = 0.0
        self.forgotten = self.skipped_blocks = 0

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
                self.pushed_out.append(oldest)
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

    def context_of(self, req_context: ReqContext) -> ReqContext:
        """Return the context for a job of a request. It has no request id if the tiers know that the request ended."""
        is_over = req_context.req_id and req_context.req_id not in self.states
        return ReqContext() if is_over else req_context

    def read_hints(self, state: RequestState, req_context: ReqContext) -> None:
        """Read the hints of a request that begins."""
        may_hint = req_context.kv_transfer_params or getattr(req_context, "kv_hints", None)
        hints = self._hint_reader.read(req_context) if may_hint else None
        if hints is not None:
            state.hints = state.chain.hints = hints
            if hints.skips_load:
                state.lookups.misses_all = Fate.BY_REQUEST
                self._skip_loads(req_context.req_id)

    def stores_nothing_of(self, req_context: ReqContext) -> bool:
        """Return whether a request began before a reset, or has the hint `skip: store`."""
        state = self.states.get(req_context.req_id)
        return req_context.req_id in self._outdated or (state is not None and state.hints.skips_store)

    def loads_nothing(self, req_context: ReqContext) -> bool:
        """Return whether a request began before a reset, or has the hint `skip: load`."""
        return req_context.req_id in self._load_skippers

    def is_outdated(self, req_context: ReqContext) -> bool:
        """Return whether a request began before a reset."""
        return req_context.req_id in self._outdated

    def outdate(self, state: RequestState) -> None:
        """Let a request store and load nothing until it ends."""
        req_id = state.req_context.req_id
        state.lookups.misses_all = Fate.RESET
        state.stores.request_level = ()
        self._outdated[req_id] = None
        self._skip_loads(req_id)
        if len(self._outdated) > STATES_MAX:
            oldest = next(iter(self._outdated))
            del self._outdated[oldest]
            self._load_again(oldest)

    def renew(self, req_context: ReqContext) -> None:
        """Note that a request's id is free: the engine has finished the request, outdated or not."""
        self._outdated.pop(req_context.req_id, None)
        if req_context.req_id not in self.states:
            self._load_again(req_context.req_id)

    def finish(self, state: RequestState) -> None:
        """Keep a finished request until its last stores have ended."""
        state.is_finished = True
        self.finished.setdefault(state, self._clock() + self._wait_max_s)
        self._leave(state)

    def contexts(self) -> list[ReqContext]:
        """Return the contexts of all requests."""
        return [state.req_context for state in self.states.values()]

    def end(self, state: RequestState) -> None:
        """Forget a request. If it is outdated, it stays so until `renew`."""
        self.pop(state)
        self._leave(state)

    def _leave(self, state: RequestState) -> None:
        state.chain.finish()
        req_id = state.req_context.req_id
        if req_id not in self._outdated and self.states.get(req_id, state) is state:  # no new request has the id
            self._load_again(req_id)

    def _skip_loads(self, req_id: str) -> None:
        self._load_skippers.add(req_id)
        self._answer_at_once(False)

    def _load_again(self, req_id: str) -> None:
        if self._load_skippers:
            self._load_skippers.discard(req_id)
            self._answer_at_once(not self._load_skippers)

    def pop(self, state: RequestState) -> None:
        self.finished.pop(state, None)
        if self.states.get(state.req_context.req_id) is state:
            del self.states[state.req_context.req_id]

    def take_over(self, now_s: float) -> list[RequestState]:
        """Return the requests that are over without having ended, for the manager to end; called once a step."""
        over, self.pushed_out = self.pushed_out, []
        while self.finished and (finished := next(iter(self.finished.items())))[1] <= now_s:
            self.pop(finished[0])
            over.append(finished[0])
        state = self.states.get("")
        if state is not None and now_s >= self._anonymous_until_s:
            self.pop(state)
            over.append(state)
            before = state.lookups
            if 0 <= now_s - before.asked_s <= PAUSE_S_MAX and before.misses_all is None:
                lookups = LookupState(waited_s=before.waited_s, asked_s=before.asked_s)
                self.state_of(state.req_context).lookups = lookups
        return over

    def snapshot(self) -> dict[str, int]:
        """Return counters of requests and their hints. Any thread may call."""
        hints = self._hint_reader
        return {
            "hinted_requests_total": hints.hinted,
            "refused_hints_total": hints.refused,
            "ignored_hint_actions_total": hints.ignored_actions,
            "forgotten_requests_total": self.forgotten,
        }
