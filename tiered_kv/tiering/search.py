"""Search: asking the secondary tiers, in order, for a block that the primary tier does not have.

The manager and `Prefetches` call it, on the manager's thread. What must stay true: each wait of an engine's request has
a limit. The search's owner learns which request asks before it learns of the request's misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.row_table import in_writing
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.cpu.writers import PROMOTED
from tiered_kv.reasons import Fate, Reason, TooSlow
from tiered_kv.tiering.answers import WrongValueError, checked_answer, checked_answers, tier_exceptions
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.pace import computed_blocks
from tiered_kv.tiering.promotions import Promotions
from tiered_kv.tiering.requests import PAUSE_S_MAX, RequestState, RequestTable
from tiered_kv.tiering.room import RoomQueue
from tiered_kv.tiering.search_owner import SearchOwner

_Lookup = Callable[[OffloadKey, ReqContext], bool | None]


class _Verdict(Enum):
    """The next step after a tier's answer to one key."""

    ASK_NEXT_TIER = "ask next tier"
    WAIT = "wait"
    MISS = "miss"


class Search:
    """Answers lookups from the secondary tiers, and starts promotions. Owned by the manager's thread.

    `wait_max_s` limits all waits of a request together: for a tier's answer, for room, for another request's store, and
    for a promotion. The time between two lookups counts from the first answer None on, up to `PAUSE_S_MAX`. The sum is
    reset when the request loads blocks that were promoted for it. At the limit, blocks that are not ready are misses
    for the request until it ends. A request that `waits_for_room` has no such limit: its caller has one.
    """

    def __init__(
        self,
        rows: PrimaryRows,
        tiers: Sequence[GuardedTier],
        promotions: Promotions,
        requests: RequestTable,
        wait_max_s: float,
        clock: Callable[[], float],
        owner: SearchOwner | None = None,
    ) -> None:
        self._rows = rows
        self._tiers = tiers
        self._owner = owner
        self._miss = None if owner is None else owner.miss
        """Reports a miss to the owner."""
        self._asking: RequestState | None = None
        """The request that asked last since `refresh`."""
        self._promotions = promotions
        self.room = RoomQueue(promotions, clock)
        self._requests = requests
        self._wait_max_s = wait_max_s
        self._clock = clock
        self._searched: list[tuple[GuardedTier, _Lookup]] = []
        self.refresh(clock())

    def refresh(self, now_s: float) -> None:
        """Begin a pass: note the time and the tiers in use. Called after a step, and when a breaker may have opened."""
        self.leave()
        self._now_s = now_s
        self._pass = object()
        self._searched = [(guarded, guarded.tier.lookup) for guarded in self._tiers if guarded.is_searched]

    def leave(self) -> None:
        """Note that the request that asks has no more questions."""
        if self._asking is not None:
            self._asking = None
            if self._owner is not None:
                self._owner.append_gathered()

    def forget(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        if state is self._asking:
            self.leave()

    @contextmanager
    def ahead(self, state: RequestState) -> Iterator[None]:
        """Look up for a request's prefetch: the request itself does not ask, and does not begin to wait."""
        self.leave()
        lookups, asked_s = state.lookups, state.lookups.asked_s
        lookups.is_asking = False
        yield
        self.leave()
        lookups.is_asking = True
        if asked_s == math.inf:
            lookups.asked_s = asked_s

    def stop(self) -> None:
        self._searched = []

    def below(self, key: OffloadKey, row: int | None, req_context: ReqContext) -> bool | None:
        """Return the answer for a key whose block is absent from the primary tier, or being written.

        `row` is as in `PrimaryRows.index`; None if absent. While any request skips loads, the block may be ready.
        """
        # Hot path: runs for each key that is not in the primary tier.
        state = self._asking
        if state is None or state.req_context is not req_context:
            state = self._requests.states.get(req_context.req_id) or self._requests.state_of(req_context)
            if state is not self._asking:
                self._attend(state)
        lookups = state.lookups
        if lookups.misses_all is not None and not (
            row is not None and row >= 0 and lookups.misses_all is Fate.TOO_LATE
        ):
            return self._answer_miss(key)
        if row is not None:
            return self._await(key, row, state)
        failed, timed_out, unanswered = lookups.failed, lookups.timed_out, lookups.unanswered
        searched = self._searched
        if (unanswered or lookups.denied) and not state.req_context.req_id:
            searched = self._not_answered(key, state)
        for guarded, lookup in searched:
            if (failed and guarded in failed.get(key, ())) or (timed_out and guarded in timed_out):
                continue
            try:
                answer = lookup(key, req_context)
            except tier_exceptions():
                self._fail(guarded, state, "lookup")
                continue
            if answer is False and not unanswered:  # this case is by far the most frequent
                continue
            verdict = self._judge(key, answer, guarded, state)
            if verdict is not _Verdict.ASK_NEXT_TIER:
                if verdict is _Verdict.WAIT:
                    return None
                break
        if (miss := self._miss) is not None:
            miss(key)
        return False

    def below_many(self, keys: Collection[OffloadKey], req_context: ReqContext) -> dict[OffloadKey, bool | None]:
        """Return `below` of distinct keys, with one call for each tier."""
        state = self._requests.state_of(req_context)
        if state is not self._asking:
            self._attend(state)
        if state.lookups.misses_all is not None:
            return self._answer_misses(keys)
        answers: dict[OffloadKey, bool | None] = {}
        rest: list[OffloadKey] = []
        promoting, get = len(state.loads.promoting), self._rows.index.get
        for key in keys:
            row = get(key)
            if row is None:
                rest.append(key)
            else:
                answers[key] = self._await(key, row, state)
        for guarded, _ in self._searched:
            if not rest:
                break
            if guarded not in state.lookups.timed_out:
                rest = self._ask_many(guarded, rest, req_context, state, answers)
        if len(state.loads.promoting) > promoting:  # new ones are in the order of the tiers, not of the prefix
            self._promotions.sort(keys, state)
        answers.update(self._answer_misses(rest))
        return answers

    def _not_answered(self, key: OffloadKey, state: RequestState) -> list[tuple[GuardedTier, _Lookup]]:
        """Return the tiers that the anonymous request asks for a key, from the awaited or next one on.

        The tiers before have answered False. They keep no answers for this request, and would look up the key again.
        """
        searched, denied = self._searched, state.lookups.denied.get(key, 0)
        waiting = (at for at, (guarded, _) in enumerate(searched) if (key, guarded) in state.lookups.unanswered)
        number = next(waiting, None)
        return searched[number:] if number is not None else [each for each in searched if each[0].number > denied]

    def _ask_many(
        self,
        guarded: GuardedTier,
        keys: list[OffloadKey],
        req_context: ReqContext,
        state: RequestState,
        answers: dict[OffloadKey, bool | None],
    ) -> list[OffloadKey]:
        """Ask one tier, put final answers into `answers`, and return the keys to ask the next tier for."""
        asked = keys
        if state.lookups.failed:
            asked = [key for key in keys if guarded not in state.lookups.failed.get(key, ())]
        if (state.lookups.unanswered or state.lookups.denied) and not state.req_context.req_id:
            asked = [key for key in asked if guarded in (each for each, _ in self._not_answered(key, state))]
        try:
            # A copy: if the tier changes its list, each key keeps its answer.
            replies = checked_answers(guarded.tier.lookup_many(asked.copy(), req_context), len(asked))
        except tier_exceptions():
            self._fail(guarded, state, "lookup_many")
            return keys
        if not state.lookups.unanswered and True not in replies and None not in replies:
            return keys
        found = dict(zip(asked, replies, strict=True))
        rest = []
        for key in keys:
            answer = found.get(key, False)
            if answer is False and not state.lookups.unanswered:
                rest.append(key)
                continue
            verdict = self._judge(key, answer, guarded, state)
            if verdict is _Verdict.ASK_NEXT_TIER:
                rest.append(key)
            elif verdict is _Verdict.WAIT:
                answers[key] = None
            else:
                answers[key] = self._answer_miss(key)
        return rest

    def _await(self, key: OffloadKey, row: int, state: RequestState) -> bool | None:
        """Return the answer for a block that is being written, or ready."""
        rows = self._rows
        if row >= 0:
            rows.step_of[row] = rows.step
            return True
        if rows.ref_cnt[in_writing(row)] == PROMOTED:
            is_known = key in state.loads.promoting
            if not self._promotions.join(key, state):
                return self._answer_miss(key)
            if not is_known and self._owner is not None:  # once, although a waiting request asks in each step
                self._owner.found(key)
        state.lookups.asked_s, state.lookups.waiting_pass = self._now_s, self._pass
        return None

    def _judge(self, key: OffloadKey, answer: bool | None, guarded: GuardedTier, state: RequestState) -> _Verdict:
        """Process a tier's answer to a key, and begin a promotion of a block that the tier has."""
        if answer is None:
            now_s = self._clock()
            if now_s - state.lookups.unanswered.setdefault((key, guarded), now_s) < guarded.settings.lookup_timeout:
                state.lookups.asked_s, state.lookups.waiting_pass = self._now_s, self._pass
                return _Verdict.WAIT
            guarded.account.lookups_timed_out()
            self._fail(guarded, state)
            return _Verdict.ASK_NEXT_TIER
        if answer is not True and answer is not False:
            try:
                answer = checked_answer(answer)
            except WrongValueError:
                self._fail(guarded, state, "lookup")
                return _Verdict.ASK_NEXT_TIER
        asked_s = state.lookups.unanswered.pop((key, guarded), None) if state.lookups.unanswered else None
        if asked_s is not None:
            waited_s = self._clock() - asked_s
            if guarded.account.looked_up(waited_s, self._now_s) and state.lookups.is_asking:
                guarded.pace.add_lookup(waited_s, self._now_s)
        if not answer:
            if asked_s is not None and not state.req_context.req_id:
                state.lookups.denied[key] = guarded.number
            return _Verdict.ASK_NEXT_TIER
        if state.loads.order is not None:
            state.loads.order.found[key] = guarded
            return _Verdict.WAIT
        if state.lookups.load_room and state.lookups.is_asking and not self._has_room(key, guarded, state):
            return _Verdict.ASK_NEXT_TIER
        if state.loads.waits_for_room:
            self.room.begin(key, guarded, state)
            is_awaited = True
        else:
            is_awaited = self._promotions.begin(key, guarded, state)
        if is_awaited:
            if key in state.loads.promoting:  # a block that waits for room is not there: the request may ask again
                if guarded in state.lookups.load_room:
                    state.lookups.load_room[guarded] -= 1
                if self._owner is not None:
                    self._owner.found(key)
            state.lookups.asked_s, state.lookups.waiting_pass = self._now_s, self._pass
            return _Verdict.WAIT
        if not state.lookups.is_asking:
            return _Verdict.WAIT  # a prefetch may wait for room without a bound
        guarded.account.refused_promotion()
        if state.log is not None:
            state.log.failed(key, guarded.number, Reason.REFUSED)
        return _Verdict.MISS

    def _answer_miss(self, key: OffloadKey) -> bool:
        if self._miss is not None:
            self._miss(key)
        return False

    def _answer_misses(self, keys: Collection[OffloadKey]) -> dict[OffloadKey, bool | None]:
        if self._miss is not None:
            for key in keys:
                self._miss(key)
        return dict.fromkeys(keys, False)

    def _attend(self, state: RequestState) -> None:
        """Note that the request of `state` asks now, and another one asked last."""
        self._asking = state
        lookups = state.lookups
        is_new = lookups.asking_pass is not self._pass
        if is_new:
            if lookups.asking_pass is not lookups.waiting_pass or self._now_s - lookups.asked_s > PAUSE_S_MAX:
                lookups.denied.clear()  # the request does not wait any more
            lookups.asking_pass = self._pass
            if lookups.asked_s < self._now_s:
                lookups.count_wait(self._now_s, self._wait_max_s if not state.loads.waits_for_room else math.inf)
            if lookups.unanswered and lookups.is_asking:
                self._leave_late_tiers(state)
        if self._owner is not None:
            because = self._reasons_not_asked(state) if is_new else None
            self._owner.asks(state.log or self._requests.log_of(state), because, is_ahead=not lookups.is_asking)

    def _reasons_not_asked(self, state: RequestState) -> bytes:
        """Return why tiers are not asked for this request, one byte for each tier; b"" if all are asked."""
        if state.lookups.misses_all is not None:
            return bytes([state.lookups.misses_all]) * (len(self._tiers) + 1)
        if len(self._searched) == len(self._tiers) and not state.lookups.timed_out:
            return b""
        reasons = bytearray(len(self._tiers) + 1)
        for guarded in self._tiers:
            if guarded in state.lookups.timed_out:
                reasons[guarded.number] = state.lookups.timed_out[guarded]
            elif not guarded.is_searched:
                reasons[guarded.number] = (guarded.refusal() or Reason.BUDGET).fate
        return bytes(reasons)

    def expect(self, blocks: int, before: int, state: RequestState, *, is_whole: bool) -> None:
        """See `CacheManager.expect`. Only the first call for a request counts."""
        lookups = state.lookups
        if blocks <= 0 or lookups.blocks_before is not None or lookups.misses_all is not None:
            return
        lookups.blocks_before, lookups.is_whole = before, is_whole
        if state.loads.promoting or state.loads.held:
            return
        for guarded in self._compared(state):
            worth = self._leave_if_late(guarded, state, blocks, blocks, self._now_s, is_whole=is_whole)
            if 0 < worth < blocks:
                lookups.load_room[guarded] = worth

    def _has_room(self, key: OffloadKey, guarded: GuardedTier, state: RequestState) -> bool:
        """Return whether a block comes before the engine would have computed it; if not, ask the tier no more."""
        if state.lookups.load_room.get(guarded, 1) > 0:
            return True
        guarded.note_too_slow(1, TooSlow.CUT)
        state.leave_tier(key, guarded, Reason.TOO_SLOW)
        return False

    def _leave_late_tiers(self, state: RequestState) -> None:
        """Stop asking tiers if their answer and blocks would arrive later than the blocks are computed."""
        for guarded in self._compared(state):
            asked = {key: since_s for (key, tier), since_s in state.lookups.unanswered.items() if tier is guarded}
            computed = computed_blocks(asked)
            if asked and not self._leave_if_late(guarded, state, len(asked), computed, min(asked.values())):
                for key in asked:
                    del state.lookups.unanswered[key, guarded]

    def _compared(self, state: RequestState) -> list[GuardedTier]:
        """Return the tiers in use, if the engine's time to compute a block is known."""
        return [guarded for guarded, _ in self._searched] if state.cost.is_known else []

    def _leave_if_late(
        self,
        guarded: GuardedTier,
        state: RequestState,
        blocks: int,
        computed: int,
        since_s: float,
        *,
        is_whole: bool = False,
    ) -> int:
        """Return how many blocks would come sooner than computed; if none, stop asking the tier for this request.

        `computed` is the number of blocks in the largest KV cache group. The request has waited since `since_s`.
        """
        reserved, before, cost = guarded.loads.reserved_blocks, state.lookups.blocks_before or 0, state.cost
        worth = guarded.pace.worth_asking(
            blocks,
            guarded.blocks_before_load(reserved + blocks) + reserved,
            lambda part: cost.saved_by(computed - blocks + part, before),
            self._now_s - since_s,
            self._now_s,
            is_whole=is_whole or computed < blocks,
            cost=cost,
        )
        if not worth:
            state.lookups.timed_out[guarded] = Fate.TOO_SLOW
            guarded.account.too_slow(blocks, TooSlow.NOT_ASKED)
        return worth

    def _fail(self, guarded: GuardedTier, state: RequestState, raised_in: str = "") -> None:
        """Stop asking a tier for this request. The breaker counts one failure, however many keys were asked for."""
        if raised_in:
            guarded.account.note_exception(raised_in)
        state.lookups.timed_out[guarded] = Fate.TIMEOUT
        now_s = self._clock()
        guarded.breaker.fail(now_s)
        self.refresh(now_s)
        self._attend(state)
