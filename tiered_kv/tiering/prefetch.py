"""Prefetches: promotions that begin before a request looks its blocks up, such as while it waits for its turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from tiered_kv.base import OffloadingManager, OffloadKey
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.tiering.promotion import Promotions
from tiered_kv.tiering.requests import RequestState
from tiered_kv.tiering.search import Search

PREFETCH_KEYS = 256
"""Keys that prefetches look up in a step, all together."""
PREFETCH_SHARE = 0.5
"""Of the promotion budget: what requests may get ahead together, until they load it, ask for it themselves or end."""


class Prefetches:
    """The prefixes that requests will need, looked up within bounds in the order in which the requests came.

    A prefix is looked up to its first miss. Its blocks are held as promoted ones are: for `hold_s` at most. A request
    that waits longer still counts. So what waits far behind does not replace what is needed sooner.

    Owned by the manager's thread.

    Args:
        manager: Whose lookups begin promotions.
        primary: Its primary tier.
        promotions: What holds the blocks.
        search: What reports the lookups to the history.
    """

    def __init__(
        self, manager: OffloadingManager, primary: CPUOffloadingManager, promotions: Promotions, search: Search
    ) -> None:
        self._manager = manager
        self._primary = primary
        self._promotions = promotions
        self._search = search
        self._states: dict[RequestState, None] = {}
        """Requests with keys to look up."""
        self._taken: dict[RequestState, int] = {}
        """Keys of each request that were looked up and not missed."""
        self._room = int(promotions.blocks_max * PREFETCH_SHARE)

    def begin(self, keys: Iterable[OffloadKey], state: RequestState) -> None:
        """Look up `keys`, which are taken one by one, at the ends of steps."""
        state.upcoming = itertools.chain(state.upcoming, keys)
        self._states[state] = None

    def ask(self) -> None:
        """Look up the keys of a step."""
        left = PREFETCH_KEYS
        ended = []
        for state in tuple(itertools.islice(self._states, PREFETCH_KEYS)):
            keys, state.wanted = state.wanted[:left], state.wanted[left:]
            new_max = min(left - len(keys), self._room)
            if not keys and new_max <= 0:
                break
            new = list(itertools.islice(state.upcoming, max(new_max, 0)))
            left -= len(keys) + len(new)
            self._count(state, len(new))
            found_all = self._look_up(keys + new, state)
            if not state.wanted and (len(new) < new_max or not found_all):
                ended.append(state)
        for state in ended:
            self._states.pop(state, None)

    def leave(self, state: RequestState) -> None:
        """Look up no more for this request; what it got does not count any more."""
        self._states.pop(state, None)
        taken = self._taken.pop(state, None)
        if taken is not None:
            self._room += taken
            state.unanswered.clear()  # the request has not waited for these answers
        state.upcoming = iter(())
        state.wanted.clear()

    def clear(self) -> None:
        """Look up no more for any request."""
        for state in {**self._states, **self._taken}:
            self.leave(state)

    def _count(self, state: RequestState, blocks: int) -> None:
        self._room -= blocks
        self._taken[state] = self._taken.get(state, 0) + blocks

    def _look_up(self, keys: list[OffloadKey], state: RequestState) -> bool:
        """Begin promotions, and keep what is there; return False at a miss, behind which nothing is of use."""
        self._search.report()
        asked_s = state.asked_s
        state.is_asking = False  # the request itself has not asked for these blocks
        waiting: list[OffloadKey] = []
        missed = 0
        for index, key in enumerate(keys):
            answer = self._manager.lookup(key, state.req_context)
            if answer is None:
                if key not in state.promoting:
                    waiting.append(key)
            elif answer:
                self._promotions.keep(self._primary.blocks[key], state)
            else:
                missed = len(keys) - index
                break
        self._search.report()
        state.is_asking = True
        if asked_s == math.inf:
            state.asked_s = asked_s  # it does not wait yet
        if missed:
            kept = set(waiting)  # nobody waits for an answer to what lies behind
            state.unanswered = {asked: since_s for asked, since_s in state.unanswered.items() if asked[0] in kept}
            state.upcoming = iter(())
            self._count(state, -missed - len(state.wanted))
            state.wanted = waiting
        else:
            state.wanted = waiting + state.wanted
        return not missed
