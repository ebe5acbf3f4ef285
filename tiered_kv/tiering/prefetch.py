"""Prefetches: promotions that begin before a request looks its blocks up, for example while it is queued.

The manager begins and ends them, and calls `ask` at each step's end, all on its thread. What must stay true: all
prefetches together look up few keys in a step, and take only a part of the promotion budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.system.step import STEP
from tiered_kv.tiering.promotions import Promotions
from tiered_kv.tiering.requests import RequestState
from tiered_kv.tiering.search import Search

PREFETCH_KEYS = 256
"""Keys that all prefetches together look up in a step."""
PREFETCH_SHARE = 0.5
"""The share of the promotion budget that all prefetches together may use, until their requests are scheduled or end."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """The keys of one prefix that have no answer yet."""

    upcoming: Iterator[OffloadKey]
    """Keys that have not been looked up."""
    wanted: list[OffloadKey] = field(default_factory=list)
    """Keys that were looked up, and have no answer."""


class Prefetches:
    """Looks up the prefixes that requests will need, in the order of the requests. Owned by the manager's thread.

    A prefix is looked up to its first miss, or to a block that would come too late. Its blocks are held for `hold_s` at
    most. A request that is queued for longer still uses its part of the promotion budget. So requests far behind do not
    replace blocks that are needed sooner.
    """

    def __init__(self, rows: PrimaryRows, promotions: Promotions, search: Search) -> None:
        self._rows = rows
        self._promotions = promotions
        self._search = search
        self.running: dict[RequestState, _Prefetch] = {}
        self._taken: dict[RequestState, int] = {}
        """How many keys of each request were looked up and not missed."""
        self._used = 0
        """The sum of `_taken`."""

    def begin(self, keys: Iterable[OffloadKey], state: RequestState) -> None:
        """Look up `keys` from the end of this step on, a part in each step."""
        running = self.running.get(state)
        if running is None:
            self.running[state] = _Prefetch(iter(keys))
        else:
            running.upcoming = itertools.chain(running.upcoming, keys)

    def ask(self) -> None:
        """Look up the next keys, at the end of a step."""
        STEP.begin()
        left = PREFETCH_KEYS
        ended = []
        for state, prefetch in tuple(itertools.islice(self.running.items(), PREFETCH_KEYS)):
            if state.loads.is_cut:
                ended.append(state)
                continue
            keys, prefetch.wanted = prefetch.wanted[:left], prefetch.wanted[left:]
            new_max = min(left - len(keys), int(self._promotions.blocks_max * PREFETCH_SHARE) - self._used)
            if not keys and new_max <= 0:
                break
            new = list(itertools.islice(prefetch.upcoming, max(new_max, 0)))
            left -= len(keys) + len(new)
            self._count(state, len(new))
            found_all = self._look_up(keys + new, state, prefetch)
            if not prefetch.wanted and (len(new) < new_max or not found_all):
                ended.append(state)
        for state in ended:
            self.running.pop(state, None)

    def leave(self, state: RequestState) -> None:
        """End the prefetch of a request, and free its room."""
        self.running.pop(state, None)
        taken = self._taken.pop(state, None)
        if taken is not None:
            self._used -= taken
            state.lookups.keep_unanswered(())  # the request itself has not waited for these answers

    def clear(self) -> None:
        """End all prefetches."""
        for state in {**self.running, **self._taken}:
            self.leave(state)

    def _count(self, state: RequestState, blocks: int) -> None:
        self._used += blocks
        self._taken[state] = self._taken.get(state, 0) + blocks

    def _look_up(self, keys: list[OffloadKey], state: RequestState, prefetch: _Prefetch) -> bool:
        """Begin promotions, and hold blocks that are ready; return False if a key is a miss, which ends the prefix."""
        waiting: list[OffloadKey] = []
        missed = 0
        with self._search.ahead(state):
            for index, key in enumerate(keys):
                row = self._rows.index.get(key)
                if row is not None and row >= 0 and state.lookups.misses_all is None:
                    self._rows.table.step[row] = self._rows.step
                    self._promotions.keep(key, row, state)
                    continue
                answer = self._search.below(key, row, state.req_context)
                if answer is None:
                    if key not in state.loads.promoting:
                        waiting.append(key)
                elif answer and row is not None:  # a lookup answers True only if it is ready
                    self._promotions.keep(key, row, state)
                else:
                    missed = len(keys) - index
                    break
        if missed:
            state.lookups.keep_unanswered(set(waiting))  # answers for keys after the miss do not matter
            self._count(state, -missed - len(prefetch.wanted))
            prefetch.upcoming, prefetch.wanted = iter(()), waiting
        else:
            prefetch.wanted = waiting + prefetch.wanted
        return not missed
