"""The requests that the tiering manager knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tiered_kv.base import ReqContext
from tiered_kv.tiering.jobs import RequestState


class RequestTable:
    """The state of each request, bounded in number.

    Calls without a request id share one state, the *anonymous* request. Nobody ends it, so it is forgotten and begun
    anew after a while: what failed for it may then be tried again, and "ask again" is bounded for it too.
    Owned by the manager's thread.

    Args:
        requests_max: Requests kept; beyond it the one seen first is forgotten.
        anonymous_max_s: How long the anonymous request lasts.
        forget: Called with a state that is forgotten without having been ended.
        clock: Seconds of a monotonic clock.
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
        self._states: dict[str, RequestState] = {}
        self._anonymous_until_s = 0.0
        self.forgotten = 0

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def get(self, req_context: ReqContext) -> RequestState | None:
        """Return the state of a request, or None where it is not known."""
        return self._states.get(req_context.req_id)

    def state_of(self, req_context: ReqContext) -> RequestState:
        """Return the state of a request, which begins here if it is not known."""
        req_id = req_context.req_id
        state = self._states.get(req_id)
        if state is not None and (req_id or self._clock() < self._anonymous_until_s):
            return state
        if state is not None:
            self._drop(state)
        elif len(self._states) >= self._requests_max:
            self._drop(next(iter(self._states.values())))
            self.forgotten += 1
        if not req_id:
            self._anonymous_until_s = self._clock() + self._anonymous_max_s
        state = self._states[req_id] = RequestState(req_context)
        return state

    def pop(self, state: RequestState) -> None:
        """Forget a request."""
        if self._states.get(state.req_context.req_id) is state:
            del self._states[state.req_context.req_id]

    def _drop(self, state: RequestState) -> None:
        self.pop(state)
        self._forget(state)

    def clear(self) -> None:
        """Forget all requests."""
        self._states.clear()
