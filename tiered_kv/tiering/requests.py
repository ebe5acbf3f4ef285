"""The requests that the tiering manager knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tiered_kv.base import ReqContext
from tiered_kv.tiering.jobs import RequestState


class RequestTable:
    """The state of each request, bounded in number.

    A request without an id is known by its context object, which is kept alive for as long.
    Owned by the manager's thread.

    Args:
        requests_max: Requests kept; beyond it the one seen first is forgotten.
        forget: Called with a state before it is forgotten that way.
    """

    def __init__(self, requests_max: int, forget: Callable[[RequestState], None]) -> None:
        self._requests_max = requests_max
        self._forget = forget
        self._states: dict[str | int, RequestState] = {}
        self.forgotten = 0

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def get(self, req_context: ReqContext) -> RequestState | None:
        """Return the state of a request, or None where it is not known."""
        return self._states.get(req_context.req_id or id(req_context))

    def state_of(self, req_context: ReqContext) -> RequestState:
        """Return the state of a request, which begins here if it is not known."""
        name = req_context.req_id or id(req_context)
        state = self._states.get(name)
        if state is None:
            if len(self._states) >= self._requests_max:
                oldest = next(iter(self._states))
                self._forget(self._states.pop(oldest))
                self.forgotten += 1
            state = self._states[name] = RequestState(req_context)
        return state

    def pop(self, state: RequestState) -> None:
        """Forget a request."""
        self._states.pop(state.req_context.req_id or id(state.req_context), None)

    def clear(self) -> None:
        """Forget all requests."""
        self._states.clear()
