"""Search: asking the secondary tiers, in order, for a block that the primary tier does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import PROMOTION, CPUBlock
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.promotion import Promotions
from tiered_kv.tiering.requests import RequestState, RequestTable

PAUSE_S_MAX = 1.0
"""The most that counts as waiting between two lookups of a request: an engine that is busy elsewhere does not wait."""


class _Verdict(Enum):
    """The outcome of a tier's answer to one key."""

    NEXT = "next"
    """This tier doesn't have it; ask the next."""
    WAIT = "wait"
    MISS = "miss"


class Search:
    """Answers lookups from the secondary tiers, and starts the promotion of their blocks.

    A request has one bound for all that it waits for: a tier's answer, room, another's store, a promotion. From its
    first answer None on, the time between two lookups counts, up to `PAUSE_S_MAX`. The count begins anew when the
    request loads blocks that were promoted for it. At the bound, blocks that are not ready are misses until it ends.

    Owned by the manager's thread.
    """

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        promotions: Promotions,
        requests: RequestTable,
        wait_max_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._promotions = promotions
        self._requests = requests
        self._states = requests.states
        self._wait_max_s = wait_max_s
        self._clock = clock
        self._searched: list[tuple[GuardedTier, Callable[[OffloadKey, ReqContext], bool | None]]] = []
        self.refresh(clock())

    def refresh(self, now_s: float) -> None:
        """Note which tiers are in use, and the time; called at a step's end and when a breaker may have changed."""
        self._now_s = now_s
        self._searched = [(guarded, guarded.tier.lookup) for guarded in self._tiers if guarded.is_searched]

    def stop(self) -> None:
        """Ask no tier from now on."""
        self._searched = []

    def below(self, key: OffloadKey, block: CPUBlock | None, req_context: ReqContext) -> bool | None:
        """Return the answer for a key whose primary block is absent, or (`block`) being written."""
        # The cost of each key that is not in the primary tier: no needless calls.
        state = self._states.get(req_context.req_id) or self._requests.state_of(req_context)
        if state.asked_s < self._now_s:
            self._count_wait(state)
        if state.has_waited:
            return False
        if block is not None:
            return self._await(key, block, state)
        failed, timed_out, is_unanswered = state.failed, state.timed_out, bool(state.unanswered)
        for guarded, lookup in self._searched:
            if (failed and guarded in failed.get(key, ())) or (timed_out and guarded in timed_out):
                continue
            try:
                answer = lookup(key, req_context)
            except Exception:
                self._fail(guarded, state, "lookup")
                continue
            if answer is False and not is_unanswered:  # by far the most frequent
                continue
            verdict = self._judge(key, answer, guarded, state)
            if verdict is not _Verdict.NEXT:
                return None if verdict is _Verdict.WAIT else False
        return False

    def below_many(
        self, keys: Iterable[OffloadKey], blocks: Mapping[OffloadKey, CPUBlock], req_context: ReqContext
    ) -> dict[OffloadKey, bool | None]:
        """Return `below` of distinct keys, with one call of each tier for all of its keys."""
        state = self._requests.state_of(req_context)
        if state.asked_s < self._now_s:
            self._count_wait(state)
        if state.has_waited:
            return dict.fromkeys(keys, False)
        answers: dict[OffloadKey, bool | None] = {}
        rest: list[OffloadKey] = []
        for key in keys:
            block = blocks.get(key)
            if block is None:
                rest.append(key)
            else:
                answers[key] = self._await(key, block, state)
        for guarded, _ in self._searched:
            if not rest:
                break
            if guarded not in state.timed_out:
                rest = self._ask_many(guarded, rest, req_context, state, answers)
        answers.update(dict.fromkeys(rest, False))
        return answers

    def _ask_many(
        self,
        guarded: GuardedTier,
        keys: list[OffloadKey],
        req_context: ReqContext,
        state: RequestState,
        answers: dict[OffloadKey, bool | None],
    ) -> list[OffloadKey]:
        """Ask one tier, put final answers into `answers`, and return the keys for the next tier."""
        asked = keys
        if state.failed:
            asked = [key for key in keys if guarded not in state.failed.get(key, ())]
        try:
            replies = guarded.tier.lookup_many(asked, req_context)
            found = dict(zip(asked, replies, strict=True))
        except Exception:
            self._fail(guarded, state, "lookup_many")
            return keys
        if not state.unanswered and True not in replies and None not in replies:
            return keys
        rest = []
        for key in keys:
            answer = found.get(key, False)
            if answer is False and not state.unanswered:
                rest.append(key)
                continue
            verdict = self._judge(key, answer, guarded, state)
            if verdict is _Verdict.NEXT:
                rest.append(key)
            else:
                answers[key] = None if verdict is _Verdict.WAIT else False
        return rest

    def _await(self, key: OffloadKey, block: CPUBlock, state: RequestState) -> bool | None:
        """Return the answer for a block that is being written."""
        if block.writer is PROMOTION and not self._promotions.join(key, state):
            return False
        state.asked_s = self._now_s
        return None

    def _judge(self, key: OffloadKey, answer: bool | None, guarded: GuardedTier, state: RequestState) -> _Verdict:
        if answer is None:
            now_s = self._clock()
            if now_s - state.unanswered.setdefault((key, guarded), now_s) < guarded.settings.lookup_timeout:
                state.asked_s = self._now_s
                return _Verdict.WAIT
            guarded.counters.add("lookup_timeouts_total")
            self._fail(guarded, state)
            return _Verdict.NEXT
        state.unanswered.pop((key, guarded), None)
        if not answer:
            return _Verdict.NEXT
        if self._promotions.begin(key, guarded, state):
            state.asked_s = self._now_s
            return _Verdict.WAIT
        guarded.counters.add("refused_promotion_blocks_total")
        return _Verdict.MISS

    def _count_wait(self, state: RequestState) -> None:
        """Count the time since the request asked last."""
        state.waited_s += min(self._now_s - state.asked_s, PAUSE_S_MAX)
        state.asked_s = self._now_s
        if state.waited_s >= self._wait_max_s:
            state.has_waited = True
            state.unanswered.clear()

    def _fail(self, guarded: GuardedTier, state: RequestState, raised_in: str = "") -> None:
        """Ask this tier no more for this request: one failure a request, however many keys it asks for."""
        if raised_in:
            guarded.note_exception(raised_in)
        state.timed_out.add(guarded)
        now_s = self._clock()
        guarded.breaker.fail(now_s)
        self.refresh(now_s)
