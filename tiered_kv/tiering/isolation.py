"""A thread of its own for a tier whose methods may block.

The contract asks a tier's methods to return at once, but a tier from outside may not keep it. Unless its class says
`is_nonblocking`, the manager drives it through an `IsolatedTier`: every call but `describe`, which is for people,
becomes a message to the tier's thread, so a call that hangs costs hits of that tier and nothing else. Nor does one
that raises end the thread, whatever it raises: `SystemExit` and `asyncio.CancelledError` are no `Exception`, and jobs
would wait for ever behind them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager

POLL_INTERVAL_S = 0.001
"""How often the tier is polled while it has jobs."""
REQUESTS_MAX = 1 << 12
"""Requests whose answers are kept; beyond it those of the oldest are forgotten, and asked again."""
QUESTIONS_MAX = 1 << 16
"""Lookups that wait for the tier's thread; beyond it a lookup is a miss."""
HINTS_MAX = 1 << 12
"""Messages that may get lost (touches, ends of requests and steps) while the tier hangs; the oldest go first."""
EVENTS_MAX = 1 << 14
"""Events kept until they are taken; beyond it the oldest are dropped."""
STATS_INTERVAL_S = 1.0
"""How old the tier's figures may be after its last job. To get them may take as long as any call."""
CLOSE_TIMEOUT_S = 5.0

_Question = tuple[str, OffloadKey]


class IsolatedTier(SecondaryTierManager):
    """Runs the methods of `inner` on one daemon thread, loads before stores.

    The scheduler's thread appends messages and reads answers; the tier's thread does the reverse. Both sides only
    use operations of deque and dict that are atomic, and the condition is never held while `inner` runs.

    Args:
        inner: The tier to isolate.
    """

    is_nonblocking = True

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner._offloading_spec, inner._primary_kv_view, inner.tier_type)
        self.inner = inner
        self._wake = threading.Condition(threading.Lock())
        self._urgent: deque[Callable[[], object]] = deque()
        self._hints: deque[Callable[[], object]] = deque(maxlen=HINTS_MAX)
        self._stores: deque[JobMetadata] = deque()
        self._questions: dict[_Question, ReqContext] = {}
        self._answers: dict[str, dict[OffloadKey, bool]] = {}  # by request
        self._results: deque[JobResult] = deque()
        self._events: deque[OffloadingEvent] = deque(maxlen=EVENTS_MAX)
        self._running: set[JobId] = set()
        self._lookup_exceptions = 0
        self._lookup_failures = 0  # the tier's own, as it said after the last round
        self._stats: Mapping[str, int] = {}  # as it said last
        self._stats_error: Exception | None = None  # what it raised then
        self._stats_noted_s = 0.0
        self._are_stats_asked_for = True
        self._are_stats_old = False
        self._is_idle = False
        self._is_closing = False
        # After reset_cache: an answer that was computed before it must not be heard.
        self._is_resetting = False
        self._cannot_reset = False
        self._thread = threading.Thread(target=self._run, name=f"tiered-kv-{inner.tier_type}-isolated", daemon=True)
        self._thread.start()

    # The scheduler's side.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._is_resetting or self._cannot_reset:
            return False
        req_id = req_context.req_id
        # Kept until the request ends; a True that a load proves wrong is corrected by the manager. A request without
        # an id has no end, so its answers are given once.
        answers = self._answers.get(req_id)
        if answers is not None:
            answer = answers.get(key) if req_id else answers.pop(key, None)
            if answer is not None:
                return answer
        question = (req_id, key)
        if question not in self._questions:
            if len(self._questions) >= QUESTIONS_MAX:
                return False
            self._questions[question] = req_context
            self._notify()
        return None

    @property
    def lookup_failures(self) -> int:
        return self._lookup_exceptions + self._lookup_failures

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._stores.append(job_metadata)
        self._notify()

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._post(lambda: self._begin(self.inner.submit_load, job_metadata))

    def get_finished(self) -> Iterable[JobResult]:
        results = self._results
        return [results.popleft() for _ in range(len(results))] if results else ()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._hint(lambda: self.inner.touch(keys, req_context))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # Its answer would have to be waited for, so an isolated tier is always served block by block.
        self._hint(lambda: self.inner.on_new_request(req_context))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._hint(lambda: self._forget_request(req_context))

    def on_schedule_end(self) -> None:
        if self._running or self._stores or self._questions:
            self._hint(self.inner.on_schedule_end)

    def reset_cache(self) -> bool:
        self._is_resetting = True
        self._answers.clear()
        self._questions.clear()
        stale, self._stores = self._stores, deque()  # not begun yet, and no longer valid
        self._results.extend(JobResult(job.job_id, False, reason="reset") for job in stale)
        self._post(self._reset)
        return True

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = self._events
        return [events.popleft() for _ in range(len(events))] if events else ()

    def stats(self) -> Mapping[str, Any]:
        # For who asks next: what changes without jobs is as old as the last question.
        self._are_stats_asked_for = True
        self._notify()
        error, self._stats_error = self._stats_error, None
        if error is not None:
            raise error
        return self._stats

    def describe(self) -> Mapping[str, object]:
        return self.inner.describe()

    def shutdown(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _hint(self, message: Callable[[], object]) -> None:
        self._hints.append(message)
        self._notify()

    def _post(self, message: Callable[[], object]) -> None:
        self._urgent.append(message)
        self._notify()

    def _notify(self) -> None:
        # The tier's thread says that it is idle before it looks at its queues for the last time. So what was appended
        # before this test is either seen by it, or it is notified.
        if self._is_idle:
            with self._wake:
                self._wake.notify()

    # The tier's side.

    def _run(self) -> None:
        while True:
            with self._wake:
                self._is_idle = True
                if not (self._urgent or self._stores or self._questions or self._hints or self._is_closing):
                    self._wake.wait(self._rest_s())
                self._is_idle = False
                if self._is_closing and not self._urgent and not self._stores:
                    break
            self._attempt(self._do_one_round)
        self._attempt(self.inner.shutdown)
        self._collect()
        self._note_stats()

    def _do_one_round(self) -> None:
        while self._urgent:
            self._attempt(self._urgent.popleft())
        self._answer()
        try:
            job = self._stores.popleft()
        except IndexError:  # none, or a reset took it
            pass
        else:
            self._begin(self.inner.submit_store, job)
        while self._hints and not self._urgent:
            self._attempt(self._hints.popleft())
        if self._running:
            num_running = len(self._running)
            self._collect()
            self._are_stats_old |= len(self._running) < num_running
        self._attempt(self._note_lookup_failures)
        if self._are_stats_asked_for or (self._are_stats_old and self._stats_age_s() >= STATS_INTERVAL_S):
            self._note_stats()

    def _rest_s(self) -> float | None:
        """Return how long to wait for a message; None for as long as it takes."""
        if self._are_stats_asked_for:
            return 0.0
        if self._running:
            return POLL_INTERVAL_S
        return max(0.0, STATS_INTERVAL_S - self._stats_age_s()) if self._are_stats_old else None

    def _answer(self) -> None:
        for question, req_context in list(self._questions.items()):
            if self._urgent:  # lookups may be slow, and loads go first
                return
            req_id, key = question
            try:
                answer = self.inner.lookup(key, req_context)
            except BaseException:
                self._lookup_exceptions += 1
                answer = False
            # A None is not kept: the manager asks again.
            if self._questions.pop(question, None) is not None and answer is not None:
                self._answers.setdefault(req_id, {})[key] = answer
        if len(self._answers) > REQUESTS_MAX:
            for req_id in list(self._answers)[:-REQUESTS_MAX]:  # a copy: a reset may empty it meanwhile
                self._answers.pop(req_id, None)

    def _begin(self, submit: Callable[[JobMetadata], None], job: JobMetadata) -> None:
        reason = ""
        if self._cannot_reset:
            reason = "disabled"
        elif job.deadline is not None and time.monotonic() > job.deadline:
            reason = "expired"
        else:
            self._running.add(job.job_id)
            try:
                submit(job)
            except BaseException:
                self._running.discard(job.job_id)
                reason = "exception"
        if reason:
            self._results.append(JobResult(job.job_id, False, reason=reason))

    def _collect(self) -> None:
        self._attempt(self._collect_results)
        self._attempt(lambda: self._events.extend(self.inner.take_events()))

    def _collect_results(self) -> None:
        for result in self.inner.get_finished():  # each at once: it is told only once, and the next may not come
            try:
                self._running.discard(result.job_id)
            except (AttributeError, TypeError):  # no result of any job
                continue
            self._results.append(result)

    def _note_lookup_failures(self) -> None:
        self._lookup_failures = self.inner.lookup_failures

    def _note_stats(self) -> None:
        self._are_stats_asked_for = self._are_stats_old = False
        try:
            self._stats = dict(self.inner.stats())
        except Exception as error:
            self._stats_error = error
        except BaseException as error:  # who asks is the scheduler, and must not be ended by it
            self._stats_error = RuntimeError(f"stats raised {type(error).__name__}")
        self._stats_noted_s = time.monotonic()

    def _stats_age_s(self) -> float:
        return time.monotonic() - self._stats_noted_s

    def _forget_request(self, req_context: ReqContext) -> None:
        self._answers.pop(req_context.req_id, None)
        self.inner.on_request_finished(req_context)

    def _reset(self) -> None:
        try:
            self._cannot_reset = not self.inner.reset_cache()
        except BaseException:
            self._cannot_reset = True
        self._answers.clear()  # an answer from before may have been noted while the manager cleared them
        self._is_resetting = False

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:
            # Calls that report nothing: there is no job to fail, and nobody waits for them.
            return
