"""Prefetches: promotions that begin before a request looks its blocks up."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.base import OffloadingManager, OffloadKey
from tiered_kv.tiering.requests import RequestState
from tiered_kv.tiering.search import Search


class Prefetches:
    """Requests some of whose keys no tier has answered yet. Owned by the manager's thread.

    Args:
        manager: Whose lookups begin promotions.
        search: What reports the lookups to the history.
    """

    def __init__(self, manager: OffloadingManager, search: Search) -> None:
        self._manager = manager
        self._search = search
        self._states: dict[RequestState, None] = {}

    def begin(self, keys: Sequence[OffloadKey], state: RequestState) -> None:
        """Begin to promote `keys` for a request."""
        state.wanted = list(dict.fromkeys((*state.wanted, *keys)))
        self._ask(state)

    def ask_again(self) -> None:
        """Ask again for keys that no tier has answered yet."""
        for state in list(self._states):
            self._ask(state)

    def leave(self, state: RequestState) -> None:
        """Ask no more for this request."""
        self._states.pop(state, None)

    def clear(self) -> None:
        """Ask no more for any request."""
        self._states.clear()

    def _ask(self, state: RequestState) -> None:
        """Ask for keys whose promotion has not begun yet."""
        keys, state.wanted = state.wanted, []
        self._search.report()
        state.is_asking = False  # the request itself has not asked for these blocks
        for key in keys:
            if self._manager.lookup(key, state.req_context) is None and key not in state.promoting:
                state.wanted.append(key)
        self._search.report()
        state.is_asking = True
        if state.wanted:
            self._states[state] = None
        else:
            self._states.pop(state, None)
