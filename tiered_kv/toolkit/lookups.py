"""Lookups in a tier with a remote index: batched, with deadlines."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_kv.base import OffloadKey, ReqContext

PENDING_KEYS_MAX = 65_536
"""Keys that may be without an answer, over all requests; further ones are a miss at once."""
PROBE_KEYS_MAX = 1024
"""Keys in one probe."""
REQUESTS_MAX = 100_000
"""Requests whose answers are kept; beyond that the first one is forgotten."""


@dataclass(slots=True, eq=False)
class _Question:
    key: OffloadKey
    deadline: float
    req_context: ReqContext
    """The request that asked first; mostly the only one."""
    others: set[str] | None = None
    """The other requests; owned by the scheduler thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Keys to be looked up in one round trip; at `deadline`, in seconds of the clock, the first becomes a miss."""

    keys: list[OffloadKey]
    deadline: float
    questions: list[_Question]

    @property
    def req_contexts(self) -> list[ReqContext]:
        """The request that asked first for each key."""
        return [question.req_context for question in self.questions]


class BatchedLookups:
    """Answers of a remote index, gathered for the requests that asked.

    The first unanswered key calls `start_probe`. Until the probe ends, further keys are collected, and the same runner
    takes them as its next probe. An answer is kept for the requests that asked, until they finish. A key whose answer
    is None is probed again. A key without an answer at its deadline is a miss for them, and so is one that would exceed
    `PENDING_KEYS_MAX`. Answers for an empty request id are not kept: each is returned once.

    The scheduler thread owns everything here but two deques, `_gathered` and `_arrived`, over which it and the runners
    hand each other messages. It calls all methods except `take` and `answer`, which belong to the runners.

    Args:
        start_probe: Must start a runner without waiting. The runner calls `take` until it returns
            None, and `answer` for each probe.
        timeout_s: How long a key may go without an answer.
        clock: Seconds, monotonic.
        on_answered: Called by the runner after each `answer`; must not wait.
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
        """Keys that became a miss because no answer came in time."""
        self.refused = 0
        """Keys that became a miss because too many were waiting."""
        self._start_probe = start_probe
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_answered = on_answered
        self._answers: dict[str, dict[OffloadKey, bool]] = {}
        self._pending: dict[OffloadKey, _Question] = {}  # ordered by deadline, since each waits equally long
        self._gathered: deque[_Question] = deque()
        self._next_deadline = math.inf  # of the first in `_pending`, or earlier
        self._arrived: deque[tuple[list[_Question], Sequence[bool | None]]] = deque()
        self._has_runner = False

    # The scheduler thread.

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return for each key, in order, True or False where the answer is known, and None where it is not yet."""
        if self._arrived:
            self._collect()
        answers = self._answers.get(req_context.req_id)
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
        """Note that a load for the request found the key missing or unusable."""
        answers = self._answers.get(req_id)
        if answers is not None and key in answers:
            answers[key] = False

    def expire(self) -> None:
        """Count keys that are late; once a step, so that a timeout is counted when it happens, whoever asks next."""
        now = self._clock()
        if self._next_deadline <= now:
            self._collect()
            self._expire(now)

    def forget_request(self, req_id: str) -> None:
        """Drop the request's answers."""
        self._answers.pop(req_id, None)

    def clear(self) -> None:
        """Drop every answer, even those that have not arrived yet."""
        self._answers.clear()
        self._pending.clear()
        self._gathered.clear()
        self._next_deadline = math.inf

    def _ask(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Look up `keys`, none of which has an answer for the request."""
        now, req_id = self._clock(), req_context.req_id
        if self._next_deadline <= now:
            self._expire(now)
            return self.lookup_many(keys, req_context)
        self._expect(req_id)
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
                question = pending[key] = _Question(key, deadline, req_context)
                gathered.append(question)
            elif question.req_context.req_id != req_id:
                if question.others is None:
                    question.others = set()
                question.others.add(req_id)
            result.append(None)
        self._next_deadline = min(self._next_deadline, deadline)
        if gathered and not self._has_runner:
            self._has_runner = True
            self._start_probe()
        return result

    def _expect(self, req_id: str) -> None:
        """Make room for the request's answers; one that has none when they arrive has finished."""
        answers = self._answers.get(req_id)
        if answers is None:
            if len(self._answers) >= REQUESTS_MAX:
                del self._answers[next(iter(self._answers))]
            self._answers[req_id] = {}
        elif not req_id and len(answers) >= PENDING_KEYS_MAX:
            answers.clear()  # nobody came back for them

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
        """Answer late keys with a miss, and stop waiting for the runner that did not take them."""
        pending = self._pending
        self._next_deadline = math.inf
        while pending:
            key, question = next(iter(pending.items()))
            if question.deadline > now:
                self._next_deadline = question.deadline
                return
            del pending[key]
            self._settle(question, False)
            self.timeouts += 1
            self._has_runner = False

    def _settle(self, question: _Question, answer: bool) -> None:
        answers = self._answers.get(question.req_context.req_id)
        if answers is not None:
            answers[question.key] = answer
        for req_id in question.others or ():
            answers = self._answers.get(req_id)
            if answers is not None:
                answers[question.key] = answer

    # The runners.

    def take(self) -> Probe | None:
        """Return the collected keys, or None; then the runner ends. Runner threads."""
        while True:
            questions = self._drain()
            if questions:
                return Probe([question.key for question in questions], questions[0].deadline, questions)
            self._has_runner = False
            # Check again: the scheduler may have added a key while it still relied on this runner.
            if not self._gathered:
                return None
            self._has_runner = True

    def answer(self, probe: Probe, answers: Sequence[bool | None]) -> None:
        """Report a probe's answers, in the order of its keys. Runner threads."""
        self._arrived.append((probe.questions, answers))
        if self._on_answered is not None:
            self._on_answered()

    def _drain(self) -> list[_Question]:
        now = self._clock()
        questions: list[_Question] = []
        try:
            while len(questions) < PROBE_KEYS_MAX:
                question = self._gathered.popleft()
                if question.deadline > now:
                    questions.append(question)
        except IndexError:
            pass
        return questions
