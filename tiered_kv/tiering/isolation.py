"""A thread of its own for a tier whose methods may block.

The contract asks a tier's methods to return at once, but a tier from outside may not keep it. Unless its class says
`is_nonblocking`, the manager drives it through an `IsolatedTier`: every call becomes a message to the tier's
thread, so a call that hangs costs hits of that tier and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager

POLL_INTERVAL_S = 0.001
"""How often the tier is polled while it has jobs."""
ANSWERS_MAX = 1 << 16
"""Answers kept for requests that are still running; beyond it the oldest are forgotten and asked again."""
QUESTIONS_MAX = 1 << 16
"""Lookups that wait for the tier's thread; beyond it a lookup is a miss."""
HINTS_MAX = 1 << 12
"""Messages that may get lost (touches, ends of requests and steps) while the tier hangs; the oldest go first."""
EVENTS_MAX = 1 << 14
"""Events kept until they are taken; beyond it the oldest are dropped."""
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
        self._urgent: deque[Callable[[], None]] = deque()
        self._hints: deque[Callable[[], None]] = deque(maxlen=HINTS_MAX)
        self._stores: deque[JobMetadata] = deque()
        self._questions: dict[_Question, ReqContext] = {}
        self._answers: dict[_Question, bool] = {}
        self._results: deque[JobResult] = deque()
        self._events: deque[OffloadingEvent] = deque(maxlen=EVENTS_MAX)
        self._jobs_running = 0
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
        question = (req_context.req_id, key)
        # Kept until the request ends; a True that a load proves wrong is corrected by the manager. A request without
        # an id has no end, so its answers are given once.
        answers = self._answers
        answer = answers.get(question) if req_context.req_id else answers.pop(question, None)
        if answer is None and question not in self._questions:
            if len(self._questions) >= QUESTIONS_MAX:
                return False
            self._questions[question] = req_context
            self._notify()
        return answer

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
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._hint(lambda: self._forget_request(req_context))

    def on_schedule_end(self) -> None:
        if self._jobs_running or self._stores or self._questions:
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

    def stats(self) -> Mapping[str, int]:
        return self.inner.stats()

    def describe(self) -> Mapping[str, object]:
        return self.inner.describe()

    def shutdown(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _hint(self, message: Callable[[], None]) -> None:
        self._hints.append(message)
        self._notify()

    def _post(self, message: Callable[[], None]) -> None:
        self._urgent.append(message)
        self._notify()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # The tier's side.

    def _run(self) -> None:
        while True:
            with self._wake:
                if not (self._urgent or self._stores or self._questions or self._hints or self._is_closing):
                    self._wake.wait(POLL_INTERVAL_S if self._jobs_running else None)
                if self._is_closing and not self._urgent and not self._stores:
                    break
            self._do_one_round()
        self._attempt(self.inner.shutdown)
        self._collect()

    def _do_one_round(self) -> None:
        while self._urgent:
            self._attempt(self._urgent.popleft())
        if self._questions:
            self._answer()
        try:
            job = self._stores.popleft()
        except IndexError:  # none, or a reset took it
            pass
        else:
            self._begin(self.inner.submit_store, job)
        while self._hints and not self._urgent:
            self._attempt(self._hints.popleft())
        if self._jobs_running:
            self._collect()

    def _answer(self) -> None:
        for question, req_context in list(self._questions.items()):
            try:
                answer = self.inner.lookup(question[1], req_context)
            except Exception:
                answer = False
            if answer is not None and question in self._questions:
                self._answers[question] = answer
            self._questions.pop(question, None)  # None: to be asked again when the manager asks again
        for question in list(self._answers)[: max(len(self._answers) - ANSWERS_MAX, 0)]:
            self._answers.pop(question, None)

    def _begin(self, submit: Callable[[JobMetadata], None], job: JobMetadata) -> None:
        if self._cannot_reset:
            self._results.append(JobResult(job.job_id, False, reason="disabled"))
            return
        try:
            submit(job)
        except Exception:
            self._results.append(JobResult(job.job_id, False, reason="exception"))
            return
        self._jobs_running += 1

    def _collect(self) -> None:
        try:
            results = list(self.inner.get_finished())
            self._events.extend(self.inner.take_events())
        except Exception:
            return
        self._jobs_running = max(self._jobs_running - len(results), 0)
        self._results.extend(results)

    def _forget_request(self, req_context: ReqContext) -> None:
        for question in [q for q in list(self._answers) if q[0] == req_context.req_id]:
            self._answers.pop(question, None)
        self.inner.on_request_finished(req_context)

    def _reset(self) -> None:
        try:
            self._cannot_reset = not self.inner.reset_cache()
        except Exception:
            self._cannot_reset = True
        self._answers.clear()  # an answer from before may have been noted while the manager cleared them
        self._is_resetting = False

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            # Calls that report nothing: there is no job to fail, and nobody waits for them.
            return
