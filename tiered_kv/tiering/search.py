"""Search: asking the secondary tiers, in order, for a block that the primary tier does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.tiering.jobs import RequestState
from tiered_kv.tiering.lane import Lane
from tiered_kv.tiering.promotion import Begun, Promotions
from tiered_kv.tiering.requests import RequestTable

_PRIMARY = "cpu"


class Search:
    """Answers lookups from the tiers below, and starts the promotion of what they have.

    "Ask again" is never answered for ever: each reason to wait has a limit, after which the answer is a miss.
    Owned by the manager's thread.

    Args:
        lanes: The tiers, in the order they are searched.
        promotions: Where a hit leads to.
        requests: The requests' states.
        wait_max_s: How long to wait for room, or for a block that an engine is storing.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        promotions: Promotions,
        requests: RequestTable,
        wait_max_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._lanes = lanes
        self._promotions = promotions
        self._requests = requests
        self._wait_max_s = wait_max_s
        self._clock = clock
        self._searched: list[tuple[Lane, Callable[[OffloadKey, ReqContext], bool | None]]] = []
        self.refresh()

    def refresh(self) -> None:
        """Note which tiers are in use; called whenever a breaker may have moved."""
        self._searched = [(lane, lane.tier.lookup) for lane in self._lanes if lane.is_searched]

    def stop(self) -> None:
        """Ask no tier from now on."""
        self._searched = []

    def below(self, key: OffloadKey, block: CPUBlock | None, req_context: ReqContext) -> bool | None:
        """Return the answer for a key whose primary block is absent, or (`block`) being written."""
        state = self._requests.state_of(req_context)
        if block is not None:
            if self._promotions.join(key, state):
                return None  # bounded by the job's deadline
            return None if self._may_wait(key, state, _PRIMARY, self._wait_max_s) else False
        failed = state.failed.get(key, ()) if state.failed else ()
        for lane, lookup in self._searched:
            if lane in state.timed_out or lane in failed:
                continue
            try:
                answer = lookup(key, req_context)
            except Exception:
                lane.note_exception("lookup")
                self._fail(lane, state)
                continue
            if answer:
                begun = self._promotions.begin(key, lane, state)
                if begun is Begun.STARTED:
                    return None
                if begun is Begun.WAIT and self._may_wait(key, state, _PRIMARY, self._wait_max_s):
                    return None
                lane.counters["refused_promotions"] += 1
                return False
            if answer is None:
                if self._may_wait(key, state, lane.name, lane.limits.lookup_timeout_s):
                    return None
                lane.counters["expired_lookups"] += 1
                self._fail(lane, state)
        return False

    def _may_wait(self, key: OffloadKey, state: RequestState, on: str, wait_max_s: float) -> bool:
        now_s = self._clock()
        return now_s - state.asked.setdefault((key, on), now_s) < wait_max_s

    def _fail(self, lane: Lane, state: RequestState) -> None:
        """Ask this tier no more for this request: one failure a request, however many keys it asks for."""
        state.timed_out.add(lane)
        lane.breaker.fail(self._clock())
        self.refresh()
