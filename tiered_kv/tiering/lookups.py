"""Batched lookups in a remote index, with deadlines.

`QueuedTier`, `IsolatedTier` and tiers of other authors own one. The scheduler's thread asks, and never waits; a worker
takes a probe and answers it. Each question gets one answer: a key without an answer at its deadline is a miss, and late
answers are ignored.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tiered_kv.base import OffloadKey, ReqContext

PENDING_KEYS_MAX = 65_536
"""Keys without an answer, over all requests; further keys are a miss at once."""
PROBE_KEYS_MAX = 1024  # keys of one round trip
REQUESTS_MAX = 100_000
"""Requests whose answers are kept; beyond it the oldest is forgotten."""


@dataclass(slots=True, eq=False)
class Question:
    """A key to look up, for the requests that have asked for it. At `deadline` it is a miss."""

    key: OffloadKey
    deadline: float
    req_context: ReqContext  # the request that asked first; mostly the only one
    others: set[str] | None = None  # the other requests; owned by the scheduler's thread


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Keys to look up in one round trip. At `deadline`, in seconds of the clock, the first key becomes a miss."""

    keys: list[OffloadKey]
    deadline: float
    questions: list[Question]


class BatchedLookups:
    """Answers of a remote index, kept for the requests that asked.

    - The first key without an answer calls `start_probe`. Keys that are asked for meanwhile make the next probe.
    - An answer is kept for the requests that asked, until they finish. With an empty request id it is returned once.
    - A key whose answer is None is probed again.
    - A key is a miss if it has no answer at its deadline, or if `PENDING_KEYS_MAX` keys have none.

    The scheduler's thread calls all methods except `take` and `answer`, which belong to the runners. It owns all state
    except `_has_runner`, which both sides write, and two message deques: `_gathered` to the runners, `_arrived` back.

    `start_probe` starts a runner, and must not wait. The runner calls `take` until it returns None, and `answer` for
    each probe. `on_answered` is called after each `answer`, on the runner's thread; it must not wait.
    """

    def __init__(
        self,
        start_probe: Callable[[], None],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_answered: Callable[[], None] | None = None,
    ) -> None:
        self.timeouts = 0
        """Keys that became a miss at their deadline."""
        self.refused = 0
        """Keys that became a miss because of `PENDING_KEYS_MAX`."""
        self._start_probe = start_probe
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_answered = on_answered
        self.answers: dict[str, dict[OffloadKey, bool]] = {}
        """The answers so far, by request."""
        # Ordered by deadline, since all have the same timeout. Late keys are deleted at the front. A `dict` would walk
        # over their empty places to find the first key.
        self._pending: OrderedDict[OffloadKey, Question] = OrderedDict()
        self._gathered: deque[Question] = deque()
        self.next_deadline = math.inf
        """No key without an answer has an earlier deadline; `expire` does nothing before this time."""
        self._arrived: deque[tuple[list[Question], Sequence[bool | None]]] = deque()
        self._has_runner = False

    # The scheduler's thread.

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return for each key, in order, its answer; None if the answer is not known yet."""
        if self._arrived:
            self._collect()
        answers = self.answers.get(req_context.req_id)
        if answers is None:
            return self._ask(keys, req_context)
        known: list[bool | None] = [answers.get(key) for key in keys]
        if None in known:
            unknown = [key for key, answer in zip(keys, known, strict=True) if answer is None]
            asked = iter(self._ask(unknown, req_context))
            known = [next(asked) if answer is None else answer for answer in known]
        if not req_context.req_id:
            for key in keys:
                answers.pop(key, None)
        return known

    def correct(self, key: OffloadKey, req_id: str) -> None:
        """Make the key a miss for the request, after a load that failed."""
        answers = self.answers.get(req_id)
        if answers is not None and key in answers:
            answers[key] = False

    def expire(self) -> None:
        """Answer late keys with a miss, so that a timeout counts even if no request asks again."""
        now = self._clock()
        if self.next_deadline <= now:
            self._collect()
            self._expire(now)

    def forget_request(self, req_id: str) -> None:
        self.answers.pop(req_id, None)

    def clear(self) -> None:
        """Drop all answers, and ignore the answers of running probes."""
        self.answers.clear()
        self._pending.clear()
        self._gathered.clear()
        self.next_deadline = math.inf

    def _ask(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Queue keys that have no answer for the request."""
        now, req_id = self._clock(), req_context.req_id
        if self.next_deadline <= now:
            self._expire(now)
            return self.lookup_many(keys, req_context)
        self._keep_answers(req_id)
        pending, gathered = self._pending, self._gathered
        deadline = now + self._timeout_s
        room = PENDING_KEYS_MAX - max(len(pending), len(gathered))
        result: list[bool | None] = []
        for key in keys:
            question = pending.get(key)
            if question is None:
                if room <= 0:
                    self.refused += 1
                    result.append(False)
                    continue
                room -= 1
                question = pending[key] = Question(key, deadline, req_context)
                gathered.append(question)
            elif question.req_context.req_id != req_id:
                if question.others is None:
                    question.others = set()
                question.others.add(req_id)
            result.append(None)
        self.next_deadline = min(self.next_deadline, deadline)
        if gathered and not self._has_runner:
            self._has_runner = True
            self._start_probe()
        return result

    def _keep_answers(self, req_id: str) -> None:
        """Keep answers for the request from now on, until it finishes."""
        answers = self.answers.get(req_id)
        if answers is None:
            if len(self.answers) >= REQUESTS_MAX:
                del self.answers[next(iter(self.answers))]
            self.answers[req_id] = {}
        elif not req_id and len(answers) >= PENDING_KEYS_MAX:
            answers.clear()  # calls without a request id have not fetched these answers

    def _collect(self) -> None:
        pending = self._pending
        while self._arrived:
            questions, answers = self._arrived.popleft()
            for question, answer in zip(questions, answers, strict=True):
                if pending.get(question.key) is not question:
                    continue
                if answer is None:
                    self._gathered.append(question)
                else:
                    del pending[question.key]
                    self._settle(question, answer)

    def _expire(self, now: float) -> None:
        """Answer late keys with a miss, and let the next key start another runner."""
        late: list[Question] = []
        self.next_deadline = math.inf
        for question in self._pending.values():
            if question.deadline > now:
                self.next_deadline = question.deadline
                break
            late.append(question)
        for question in late:
            del self._pending[question.key]
            self._settle(question, False)
        if late:
            self.timeouts += len(late)
            self._has_runner = False

    def _settle(self, question: Question, answer: bool) -> None:
        for req_id in (question.req_context.req_id, *(question.others or ())):
            answers = self.answers.get(req_id)
            if answers is not None:
                answers[question.key] = answer

    # Runners.

    def take(self) -> Probe | None:
        """Return a probe of the gathered keys. None ends the runner."""
        while True:
            questions = self._drain()
            if questions:
                return Probe([question.key for question in questions], questions[0].deadline, questions)
            self._has_runner = False
            # Check again: the scheduler may have added a key before it saw the assignment.
            if not self._gathered:
                return None
            self._has_runner = True

    def answer(self, probe: Probe, answers: Sequence[bool | None]) -> None:
        """Report a probe's answers, in the order of its keys."""
        self._arrived.append((probe.questions, answers))
        if self._on_answered is not None:
            self._on_answered()

    def _drain(self) -> list[Question]:
        now = self._clock()
        questions: list[Question] = []
        with suppress(IndexError):  # the deque is empty; another runner may take from it too
            while len(questions) < PROBE_KEYS_MAX:
                question = self._gathered.popleft()
                if question.deadline > now:
                    questions.append(question)
        return questions
