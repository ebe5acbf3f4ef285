"""An isolated tier: a tier that may block, on a thread of its own.

`GuardedTier` wraps each tier that is not `is_nonblocking`, and calls the wrapper on the scheduler's thread. A call
leaves a message for the tier's thread, or reads its answers. These things must stay true:

- Neither loads nor stores that never end keep the others from beginning.
- No call but `describe` and `shutdown` waits for the tier. A call that hangs costs only hits of that tier.
- No exception ends the thread, not even `SystemExit` or `asyncio.CancelledError`: later jobs would wait for ever.
- Queues have limits. Beyond them hints, and messages about requests, are dropped, but no job.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from tiered_kv.errors import ResourceError
from tiered_kv.reasons import Reason
from tiered_kv.system.threads import start_thread
from tiered_kv.tiering.answers import (
    WrongValueError,
    checked_answer,
    checked_event,
    checked_flag,
    checked_keys,
    checked_result,
    checked_stats,
)
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.lookups import BatchedLookups, Probe, Question
from tiered_kv.tiering.wrapper import WrapperTier

POLL_INTERVAL_S = 0.001
"""Seconds between two polls of a tier that has jobs."""
PATIENCE_S = 0.2
"""How long loads that never end keep stores, lookups and hints back, at most. The last load may take longer."""
LOADS_A_STORE = 4
"""So many loads go before a store, at least, though each takes long."""
SLICE_S = 0.001
"""Seconds of each pass for lookups, and for hints. The last call of them may take longer."""
HINTS_MAX = 1 << 12
"""Queued messages about touches and ends of steps; while the tier hangs, the oldest are dropped."""
REQUESTS_MAX = 100_000
"""Limit of the queued loads, and of the queued stores. If the tier hangs, further messages about requests are
dropped."""
UNKNOWN_RESULTS_MAX = 1 << 10
"""Results without a running job that are kept until they are counted."""
EVENTS_MAX = 1 << 14
"""Events that are kept until they are taken; the oldest are dropped."""
CLOSE_TIMEOUT_S = 5.0  # how long `shutdown` waits for the thread

_Item = TypeVar("_Item")


class IsolatedTier(WrapperTier):
    """Runs the methods of `inner` on one daemon thread, loads before stores.

    The scheduler's thread appends messages and reads answers; the tier's thread reads messages and appends answers.
    Both threads use only atomic operations of deque and set.

    After an exception of the tier, its thread calls `note_exception` with the method's name.
    """

    is_nonblocking = True

    def __init__(
        self, inner: SecondaryTierManager, lookup_timeout_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self.note_exception: Callable[[str], None] = lambda operation: None
        self._clock = clock
        self._on_finished = self.tier_spec.on_finished
        self._lookups = BatchedLookups(
            self._post_probe, timeout_s=lookup_timeout_s, clock=clock, on_answered=self._on_finished
        )
        self._wake = threading.Event()
        self._urgent: deque[Callable[[], object]] = deque()  # loads, resets, and beginnings of requests
        self._hints: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=HINTS_MAX)
        self._stores: deque[tuple[int, JobMetadata | ReqContext]] = deque()
        """Stores, and contexts of ended requests behind their last stores. Each with the `_urgent_posted` before it."""
        self._urgent_posted = 0  # written by the scheduler's thread
        self._urgent_done = 0  # written by the tier's thread
        self._has_probe = False
        self._questions: deque[Question] = deque()  # the last probe's; owned by the tier's thread
        self._results: deque[JobResult] = deque()
        self._events: deque[OffloadingEvent] = deque(maxlen=EVENTS_MAX)
        self._absent: deque[OffloadKey] = deque(maxlen=EVENTS_MAX)
        self._running: set[JobId] = set()  # jobs that `inner` has not reported
        self._lookup_exceptions = 0
        self._inner_failures = 0  # `inner.lookup_failures`, read once a pass
        self._stats: Mapping[str, Any] = {}  # `inner.stats()`, read at the start, after each job and at the end
        self._relocated_blocks = 0  # `inner.relocated_blocks`, read at the same times
        self._is_closing = False
        self._resets = 0  # asked for; written by the scheduler's thread
        self._resets_made = 0  # begun; written by the tier's thread
        self._resets_done = 0  # ended; written by the tier's thread
        self._cannot_reset = False
        self._thread: threading.Thread | None = None
        self._ensure_thread()

    # The scheduler's side.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.lookup_many((key,), req_context)[0]

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if self._resets != self._resets_done or self._cannot_reset:
            return [False] * len(keys)
        return self._lookups.lookup_many(keys, req_context)

    @property
    def lookup_failures(self) -> int:
        return self._lookup_exceptions + self._inner_failures + self._lookups.timeouts

    @property
    def relocated_blocks(self) -> int:
        return self._relocated_blocks

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._stores.append((self._urgent_posted, job_metadata))
        self._notify()

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._post_urgent(lambda: self._begin(self.inner.submit_load, job_metadata))

    def get_finished(self) -> Iterable[JobResult]:
        self._lookups.expire()
        self._ensure_thread()
        if self._running and self._on_finished is not None and not (self._thread and self._thread.is_alive()):
            self._collect()  # a program waits for its memory: a job that hung when the tier was closed may have ended
        return _take_all(self._results)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._hint("touch", keys, req_context)

    def take_absent(self) -> Iterable[OffloadKey]:
        return _take_all(self._absent)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # The scheduler cannot wait for the tier's policy, so an isolated tier has the default one.
        if len(self._urgent) < REQUESTS_MAX:  # the message goes before all jobs of the request
            self._post_urgent(lambda: self._attempt("on_new_request", self.inner.on_new_request, req_context))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget_request(req_context.req_id)
        if len(self._stores) < REQUESTS_MAX:
            self._stores.append((self._urgent_posted, req_context))
            self._notify()

    def on_schedule_end(self) -> None:
        if self._running or self._stores or self._has_probe:
            self._hint("on_schedule_end")

    @property
    def has_saved_reset(self) -> bool:
        return self._resets == self._resets_made and self.inner.has_saved_reset

    def reset_cache(self) -> bool:
        self._resets += 1
        self._lookups.clear()
        # Stores that have not begun are not valid any more.
        queued = list(_take_all(self._stores))
        self._results.extend(
            JobResult(each.job_id, False, reason=Reason.RESET) for _, each in queued if isinstance(each, JobMetadata)
        )
        self._stores.extend(ended for ended in queued if not isinstance(ended[1], JobMetadata))
        self._post_urgent(self._reset)
        return True

    def take_events(self) -> Iterable[OffloadingEvent]:
        # Until the tier has been reset, its events may be from before the reset; `_reset` drops them.
        return () if self._resets != self._resets_done or self._cannot_reset else _take_all(self._events)

    def stats(self) -> Mapping[str, Any]:
        return self._stats

    def explain_failure(self, reason: str) -> str | None:
        return None  # a call of the tier might take long

    def shutdown(self) -> None:
        self._ensure_thread()
        is_first, self._is_closing = not self._is_closing, True
        if self._thread is not None:
            self._wake.set()
            self._thread.join(CLOSE_TIMEOUT_S)
        elif is_first:
            self._run()  # no thread runs: this call ends at once, since `_is_closing` is set

    def _post_urgent(self, call: Callable[[], object]) -> None:
        self._urgent_posted += 1
        self._urgent.append(call)
        self._notify()

    def _post_probe(self) -> None:
        self._has_probe = True
        self._notify()

    def _hint(self, method: str, *arguments: Any) -> None:  # Any: as the tier's method takes
        self._hints.append((method, arguments))
        self._notify()

    def _notify(self) -> None:
        if not self._wake.is_set():  # if the flag is set, the tier's thread has yet to look for messages
            self._wake.set()

    def _ensure_thread(self) -> None:
        """Start the tier's thread if there is none; each step tries again."""
        if self._thread is None and not self._is_closing:
            with suppress(ResourceError):
                self._thread = start_thread(self._run, f"tiered-kv-{self.inner.tier_type}-isolated")

    # The tier's side.

    def _run(self) -> None:
        self._attempt("stats", self._note_stats)
        while True:
            if not (self._urgent or self._stores or self._has_probe or self._hints or self._is_closing):
                self._wake.wait(POLL_INTERVAL_S if self._running else None)
            self._wake.clear()
            if self._is_closing and not self._urgent and not self._stores:
                break
            self._attempt("its thread", self._make_one_pass)
        self._attempt("shutdown", self.inner.shutdown)
        self._collect()
        self._attempt("stats", self._note_stats)

    def _make_one_pass(self) -> None:
        self._do_urgent()
        self._answer()
        try:
            urgent_before, job = self._stores.popleft()
        except IndexError:  # none, or a reset took it
            pass
        else:
            if urgent_before > self._urgent_done:
                self._do_urgent(urgent_before)  # such as a reset that came before the store
            if isinstance(job, JobMetadata):
                self._begin(self.inner.submit_store, job)
            else:
                self._attempt("on_request_finished", self.inner.on_request_finished, job)
        if self._hints:
            self._for_a_while(self._hints, lambda hint: self._attempt(hint[0], getattr(self.inner, hint[0]), *hint[1]))
            self._attempt("take_absent", lambda: self._absent.extend(checked_keys(self.inner.take_absent())))
        if self._running:
            self._collect()
        self._attempt("lookup_failures", self._note_lookup_failures)

    def _do_urgent(self, before: int = 0) -> None:
        """Make waiting calls: the first `before` of all, and as many others as may keep a store back."""
        end_s = time.monotonic() + PATIENCE_S
        before = max(before, self._urgent_done + LOADS_A_STORE)
        while self._urgent and (self._urgent_done < before or time.monotonic() < end_s):
            self._urgent_done += 1
            self._urgent.popleft()()

    def _for_a_while(self, queue: deque[_Item], use: Callable[[_Item], object]) -> None:
        """Use items of a queue for `SLICE_S`, one at least: any call may be slow. New loads go first, each time."""
        end_s = time.monotonic() + SLICE_S
        while queue:
            use(queue.popleft())
            self._do_urgent()
            if time.monotonic() >= end_s:
                break

    def _answer(self) -> None:
        """Look up gathered keys, for a while, so that loads, stores and results do not wait for all of them."""
        if not self._questions:
            self._has_probe = False
            probe = self._lookups.take()
            if probe is None:
                return
            self._questions.extend(probe.questions)
        self._for_a_while(self._questions, self._look_up)
        self._has_probe = True  # `take` has to be called until it returns None

    def _look_up(self, question: Question) -> None:
        if question.deadline <= self._clock():
            return  # it is a miss already
        answer: bool | None = False
        try:
            answer = checked_answer(self.inner.lookup(question.key, question.req_context))
        except BaseException:
            self._lookup_exceptions += 1
            self.note_exception("lookup")
        # One by one: the next lookup may be slow.
        self._lookups.answer(Probe([question.key], question.deadline, [question]), [answer])

    def _begin(self, submit: Callable[[JobMetadata], None], job: JobMetadata) -> None:
        reason: Reason | None = None
        if self._cannot_reset:
            reason = Reason.DISABLED
        elif job.deadline is not None and self._clock() > job.deadline:
            reason = Reason.EXPIRED
        else:
            self._running.add(job.job_id)
            try:
                submit(job)
            except BaseException:
                self._running.discard(job.job_id)
                self.note_exception("submit_load" if job.is_promotion else "submit_store")
                reason = Reason.EXCEPTION
            else:
                self._collect()  # the job may have ended already, and the next call may take long
        if reason is not None:
            self._results.append(JobResult(job.job_id, False, reason=reason))
            self._notify_host()

    def _collect(self) -> None:
        num_running = len(self._running)
        self._attempt("get_finished", self._collect_results)
        self._attempt("take_events", lambda: self._events.extend(map(checked_event, self.inner.take_events())))
        if len(self._running) < num_running:
            self._attempt("stats", self._note_stats)

    def _collect_results(self) -> None:
        for raw in self.inner.get_finished() or ():  # one by one: the iterator may raise, and a result comes only once
            try:
                result = checked_result(raw)
                is_known = result.job_id in self._running
                self._running.discard(result.job_id)
            except WrongValueError:  # `GuardedTier` checks it again, and counts a failure for the breaker
                result, is_known = raw, False
            if is_known or len(self._results) < UNKNOWN_RESULTS_MAX:
                self._results.append(result)
                self._notify_host()

    def _notify_host(self) -> None:
        if self._on_finished is not None:
            self._on_finished()

    def _note_lookup_failures(self) -> None:
        self._inner_failures = _count_of(self.inner.lookup_failures)

    def _note_stats(self) -> None:
        self._stats = checked_stats(self.inner.stats())
        self._relocated_blocks = _count_of(self.inner.relocated_blocks)

    def _reset(self) -> None:
        self._questions.clear()
        self._resets_made += 1
        try:
            self._cannot_reset = not checked_flag(self.inner.reset_cache())
        except BaseException:
            self._cannot_reset = True
            self.note_exception("reset_cache")
        self._attempt("take_events", lambda: list(self.inner.take_events()))  # dropped: they are from before the reset
        self._events.clear()
        self._resets_done += 1

    def _attempt(self, method: str, call: Callable[..., object], *arguments: Any) -> None:
        """Make a call; note its exceptions, and go on."""
        try:
            call(*arguments)
        except BaseException:
            self.note_exception(method)


def _count_of(found: Any) -> int:  # Any: from a third-party tier, that may have a method in place of the property
    return operator.index(found() if callable(found) else found)


def _take_all(queue: deque[_Item]) -> Iterable[_Item]:
    """Remove and return the messages in a queue. Meanwhile another thread may append or take messages."""
    taken: list[_Item] = []
    with suppress(IndexError):  # the other thread has emptied it
        for _ in range(len(queue)):
            taken.append(queue.popleft())
    return taken
