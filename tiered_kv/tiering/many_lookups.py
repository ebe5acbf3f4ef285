"""Lookups of many blocks in one call, for a host's sessions and for a program's `put` and `get`.

The manager calls it, on the manager's thread. What must stay true: a request that waits for room holds no block that
another request needs to go on. For a program, no block behind the first missing block of a prefix is promoted.

A program's lookup of a prefix waits for room in these steps. `requests.LoadState` has the state of a request, and
`room.RoomQueue` the order of the waiting requests:

1. `lookup_prefix` sets `waits_for_room` of the request, and clears `lacking`.
2. The search finds a block in a tier, and calls `RoomQueue.begin`. Without room for the block, `begin` sets `lacking`
   to the block and to the room that is full.
3. After the lookup, `RoomQueue.note` looks at `lacking`. If the first block that is not ready has no room, the request
   ends its holds, and waits.
4. At its next lookup a waiting request first asks for the ready blocks and one more. Only when that block has room, the
   request asks for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.row_table import ABSENT
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.answers import checked_answers, tier_exceptions
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.requests import RequestState, RequestTable
from tiered_kv.tiering.search import Search

Answers = list[bool | None]


class ManyLookups:
    """Answers for many keys at a time. Owned by the manager's thread."""

    def __init__(
        self,
        rows: PrimaryRows,
        tiers: Sequence[GuardedTier],
        requests: RequestTable,
        search: Search,
        clock: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._tiers = tiers
        self._requests = requests
        self._search = search
        self._clock = clock

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        """See `CacheManager.lookup_many`."""
        if self._requests.loads_nothing(req_context):
            self._search.below_many(keys, req_context)
            return [False] * len(keys)
        step_of, step = self._rows.table.step, self._rows.step
        missing: dict[OffloadKey, None] = {}
        get = self._rows.index.get
        for key in keys:
            row = get(key, ABSENT)
            if row >= 0:
                step_of[row] = step
            else:
                missing[key] = None
        if not missing:
            return [True] * len(keys)
        below = self._search.below_many(missing, req_context)
        return [below.get(key, True) for key in keys]

    def contains_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        """See `CalledManager.contains_many`."""
        row_of = self._rows.row_of
        found: dict[OffloadKey, bool | None] = {key: True for key in keys if row_of(key) is not None}
        rest = [key for key in dict.fromkeys(keys) if key not in found]
        for guarded in self._tiers:
            if rest:
                found.update(zip(rest, ask_tier(guarded, rest, req_context, self._clock()), strict=True))
                rest = [key for key in rest if found[key] is False]
        return [found.get(key, False) for key in keys]

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        """See `CalledManager.lookup_prefix`."""
        state = self._requests.state_of(req_context)
        state.loads.waits_for_room, state.loads.lacking = True, None
        if self._search.room.is_waiting(state):
            ready = list(itertools.takewhile(self._is_ready, keys))
            head = self._lookup_noted(keys[: len(ready) + 1], state)
            if state.loads.lacking is not None:  # no room yet for the first block that is not ready
                return [*head, *[None] * (len(keys) - len(head))]
        return self._lookup_noted(keys, state)

    def _lookup_noted(self, keys: Sequence[OffloadKey], state: RequestState) -> Answers:
        """Look keys up, and let the request wait if its first block that is not ready has no room."""
        answers = self._answer(keys, state)
        needed = None if all(answers) else keys[next(index for index, answer in enumerate(answers) if not answer)]
        self._search.room.note(state, needed)
        return answers

    def _is_ready(self, key: OffloadKey) -> bool:
        return self._rows.row_of(key) is not None

    def _answer(self, keys: Sequence[OffloadKey], state: RequestState) -> Answers:
        """Look up the prefix of the keys that ends with the first missing block, and the missing blocks behind the end.

        A lookup promotes a block that a tier has, and counts and explains a miss. `contains_many` does neither, so it
        may ask for all keys first. The blocks that it finds behind the end are of no use: a lookup would promote them.
        The missing blocks behind the end are looked up to be counted: no tier has a block of them to promote.
        """
        req_context = state.req_context
        if self._requests.loads_nothing(req_context) or state.lookups.timed_out:
            return self.lookup_many(keys, req_context)  # it asks no tier, or no tier that failed this request
        below = [key for key in keys if key not in self._rows]  # the primary tier has, or gets, the other blocks
        if not below:
            return self.lookup_many(keys, req_context)
        found = dict(zip(below, self.contains_many(below, req_context), strict=True))
        end = next((index for index, key in enumerate(keys) if found.get(key) is False), len(keys))  # end of the prefix
        asked = [*keys[:end], *(key for key in keys[end:] if found.get(key) is False)]
        answers = dict(zip(asked, self.lookup_many(asked, req_context), strict=True))
        return [answers.get(key) for key in keys]


def ask_tier(guarded: GuardedTier, keys: list[OffloadKey], req_context: ReqContext, now_s: float) -> list[bool | None]:
    """Return which blocks a tier has, None while it has not answered; all False if it is not searched, or raises."""
    if guarded.is_searched:
        try:
            return checked_answers(guarded.tier.lookup_many(keys.copy(), req_context), len(keys))
        except tier_exceptions():
            guarded.account.note_exception("lookup_many")
        guarded.breaker.fail(now_s)
    return [False] * len(keys)
