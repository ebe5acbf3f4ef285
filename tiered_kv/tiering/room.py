"""The order of requests that wait for room: for rows, or for load budget. Only programs' requests wait; others miss.

`Search` calls it for each block that such a request needs, and `ManyLookups` after each lookup, both on the scheduler's
thread. What must stay true: a request without room for its first block holds no promoted block. So a waiting request
keeps no room from others, and one of them always goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.promotions import Promotions
from tiered_kv.tiering.requests import RequestState

PATIENCE_S: Final = 0.02
"""Seconds of waiting after which a request gets room before requests that came later. Until then, the next request that
asks gets the room, so that no room is unused until the first one asks again."""


class RoomQueue:
    """Begins promotions for requests that wait for room. Owned by the manager's thread."""

    def __init__(self, promotions: Promotions, clock: Callable[[], float]) -> None:
        self._promotions = promotions
        self._clock = clock
        self._waiting: dict[GuardedTier | None, dict[RequestState, float]] = {}
        """The waiting requests with the times since when they wait, the oldest first. The outer key is the full room: a
        tier's load budget, or the rows (None)."""

    def begin(self, key: OffloadKey, guarded: GuardedTier, state: RequestState) -> None:
        """Begin to promote a block, unless room is lacking for it, or for a block that was looked up before it."""
        if state.loads.lacking is not None:
            return
        is_behind = self._is_behind(state, None) or self._is_behind(state, guarded)
        if not is_behind:
            self._promotions.begin(key, guarded, state)
        if key not in state.loads.promoting:
            is_budget = guarded.load_room() <= 0 or self._is_behind(state, guarded)
            state.loads.lacking = key, guarded if is_budget else None

    def note(self, state: RequestState, needed: OffloadKey | None) -> None:
        """Note the result of a lookup; `needed` is the first block that is not ready.

        A request without room for it ends its holds, and waits.
        """
        lacking = state.loads.lacking
        if lacking is None or needed is None or self._may_come(needed, state):
            self.leave(state)
            return
        queue = self._waiting.setdefault(lacking[1], {})
        if state not in queue:
            self.leave(state)
            queue[state] = self._clock()
        self._promotions.release(state)

    def is_waiting(self, state: RequestState) -> bool:
        return bool(self._waiting) and any(state in queue for queue in self._waiting.values())

    def leave(self, state: RequestState) -> None:
        """Forget a request that lacks no room any more, or has ended."""
        for queue in self._waiting.values():
            queue.pop(state, None)

    @staticmethod
    def _may_come(key: OffloadKey, state: RequestState) -> bool:
        return key in state.loads.promoting or any(asked == key for asked, _ in state.lookups.unanswered)

    def _is_behind(self, state: RequestState, guarded: GuardedTier | None) -> bool:
        """Return whether another request has waited `PATIENCE_S` for this room."""
        first, since_s = next(iter(self._waiting.get(guarded, {}).items()), (state, 0.0))
        return first is not state and self._clock() - since_s >= PATIENCE_S
