"""Threads beside the scheduler's: they start, which the system may refuse, and they give way to the scheduler's step.

A system refuses a thread at its limit of processes, or of memory.

A thread that needs CPython's interpreter lock waits up to `sys.getswitchinterval()` (5 ms) until the holder must
release it. A scheduler that loses the lock within a step would wait that long for a worker that computes. So the
manager marks its step, and each worker pauses between two blocks while a step runs:

    scheduler: STEP.begin() ... on_schedule_end: STEP.end()
    worker:    give_way(), load or store a block, give_way(), ...

The engine's thread computes outside of the manager's step too: it launches the model's kernels, and handles tokens. No
request waits for a store. So before a store, a worker waits until the engine's thread is idle, judged by that thread's
CPU clock:

    worker:    wait_for_idle(...), give_way(), store a block, ...
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from tiered_kv.errors import ResourceError

_log = logging.getLogger(__name__)

Item = TypeVar("Item")
P = ParamSpec("P")
T = TypeVar("T")

PAUSES_MAX = 200
"""Pauses of all workers after the last `STEP.begin`. A step without `on_schedule_end` delays them by 20 ms at most."""
PAUSE_S = 0.0001
IDLE_WAIT_S_MAX = 0.02
"""How long one `wait_for_idle` lasts at most, however busy the engine is."""
_IDLE_PAUSE_S = 0.001
_SAMPLE_S_MIN = 0.0002
"""The shortest time over which the CPU clock tells a busy thread from an idle one."""
_BUSY_SHARE = 0.5
"""A thread is busy if it computes for more than this share of the time."""


def start_thread(target: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Return a daemon thread that calls `target(*arguments)`.

    Raises:
        ResourceError: The system gives no thread.
    """
    try:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise ResourceError.of(f"the thread '{name}' cannot be started", error) from error
    return thread


def run_all(function: Callable[[Item], T], items: Iterable[Item], name: str, threads_max: int) -> list[Future[T]]:
    """Call `function` for each item, on this thread and on others if the system gives any; return the ended calls.

    Up to `threads_max` threads, this one included, make the calls. The others end with the last call.
    """
    calls = [(Future[T](), item) for item in items]
    waiting = deque(calls)

    def serve() -> None:
        with suppress(IndexError):
            while True:
                future, item = waiting.popleft()
                _run(future, partial(function, item))

    helpers: list[threading.Thread] = []
    with suppress(ResourceError):
        for number in range(min(threads_max, len(calls)) - 1):
            helpers.append(start_thread(serve, f"{name}-{number}"))
    serve()
    for helper in helpers:
        helper.join()
    return [future for future, _ in calls]


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def call_within(limit_s: float, work: Callable[[], T], name: str, undo: Callable[[T], object] | None = None) -> T:
    """Run `work`, which may hang in the kernel, on a thread of its own; return its result, or raise its exception.

    `undo` gets a result that comes too late, or after an exception of the waiting thread.

    Raises:
        TimeoutError: It has not ended in time. Its thread is left behind.
        ResourceError: The system gives no thread.
    """
    future: Future[T] = Future()
    thread = start_thread(_run, name, future, work)
    try:
        wait([future], timeout=limit_s)
        if not future.done():
            raise TimeoutError(f"no answer in {limit_s:g} s")
        thread.join()
        return future.result()
    except BaseException:
        if undo is not None:
            future.add_done_callback(partial(_undo, undo))
        raise
    finally:
        del future  # an error of `work` has this frame, and its variables would keep the error


def _undo(undo: Callable[[Any], object], future: Future[Any]) -> None:  # Any: the result of a call
    if future.exception() is None:
        undo(future.result())


class DaemonThreads(Executor):
    """Runs calls on daemon threads. A call that is refused never runs.

    The standard library's executor queues a call before it starts a thread for it. If the start fails, it raises, but
    still runs the call later: on memory that others use by then. It would also wait at exit for calls that hang.

    Each of the first calls starts a thread. Callers limit how many calls they make at once, so the queue needs no
    limit. Any thread may call.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()  # Any: a call's result
        self._lock = threading.Lock()  # guards the two below; held for assignments and the start of a thread
        self._threads: list[threading.Thread] = []
        self._is_shut_down = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As in `Executor`; raises `ResourceError` if there is no thread, and none can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"the threads '{self._name}' were shut down")
            if len(self._threads) < self._threads_max:
                try:
                    self._threads.append(start_thread(self._serve, f"{self._name}-{len(self._threads)}"))
                except ResourceError:  # the existing ones must suffice
                    if not self._threads:
                        raise
            self._calls.put((future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when the queue is empty; `cancel_futures` empties it. `join` waits, this never does."""
        with self._lock:
            self._is_shut_down = True
            with suppress(Empty):
                while cancel_futures:
                    if (call := self._calls.get_nowait()) is not None:
                        call[0].cancel()
            for _ in self._threads:
                self._calls.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (of `time.monotonic()`)."""
        for thread in self._threads:
            thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                _run(future, function)
            del call, future, function  # releases their views of the region


class BackgroundTask:
    """Runs an action soon after a request; one run serves all requests before it. Exceptions are logged only.

    There is at most one thread, called `name`, which ends with the action: an action that hangs blocks nothing else. If
    no thread can be started, the action is not run, and its owner must have another way to run it.
    """

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._action = action
        self._name = name
        self._lock = threading.Lock()  # guards the two below; held for assignments and the start of a thread
        self._is_asked = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Run the action once more from its beginning, if a thread can be started. Does not wait. Any thread."""
        with self._lock:
            self._is_asked = True
            if self._thread is not None:
                return
            with suppress(ResourceError):
                self._thread = start_thread(self._run, self._name)

    def join(self, timeout_s: float) -> bool:
        """Wait until nothing runs; return whether that is so."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_asked:
                    self._thread = None
                    return
                self._is_asked = False
            try:
                self._action()
            except BaseException:  # SystemExit too: later requests would not run
                with suppress(Exception):  # a log handler's
                    _log.exception("%s failed", self._name)


class Step:
    """The step of this process's scheduler. It needs no lock: a race of two workers miscounts by one pause."""

    __slots__ = ("_clock_id", "_is_busy", "_sampled_s", "_thread", "_used_s", "pauses_left")

    def __init__(self) -> None:
        self.pauses_left = 0
        """Above 0 while a step runs; workers count it down."""
        self._thread = 0  # the scheduler's thread at the last `end`
        self._clock_id: int | None = None  # its CPU clock
        self._is_busy = False
        self._sampled_s = self._used_s = 0.0

    def begin(self) -> None:
        """Let workers pause until the step ends. Each further call of the step calls it again."""
        self.pauses_left = PAUSES_MAX

    def end(self, *, is_scheduler: bool = True) -> None:
        """Let workers go on. If the calling thread is a scheduler's, `is_busy` reads its CPU clock from now on."""
        self.pauses_left = 0
        if is_scheduler and ((thread := threading.get_ident()) != self._thread or self._clock_id is None):
            self._clock_id, self._thread = time.pthread_getcpuclockid(thread), thread

    def is_busy(self) -> bool:
        """Return whether the scheduler's thread has computed for most of the time since the last call."""
        if self._clock_id is None:
            return False
        now_s = time.monotonic()
        passed_s = now_s - self._sampled_s
        if passed_s >= _SAMPLE_S_MIN:
            try:
                used_s = time.clock_gettime(self._clock_id)
            except OSError:  # the thread has ended, or is the parent process's; the next may have its identity
                self._clock_id = None
                return False
            self._is_busy = used_s - self._used_s > _BUSY_SHARE * passed_s
            self._sampled_s, self._used_s = now_s, used_s
        return self._is_busy


STEP = Step()


def give_way(pause_s: float = PAUSE_S) -> None:
    """Pause while a scheduler's step runs. Workers call this between two blocks, without holding a lock.

    It costs less than 100 ns if no step runs. Background work passes a longer `pause_s`: each thread that wakes takes
    the interpreter lock from the scheduler. So fewer pauses cost the step less.
    """
    if STEP.pauses_left > 0:
        STEP.pauses_left -= 1
        time.sleep(pause_s)


def wait_for_idle(limit_s: float) -> bool:
    """Wait while the scheduler's thread computes, for `limit_s` at most; return whether it has paused.

    Workers call this before they store blocks.
    """
    end_s = time.monotonic() + limit_s
    pause_s = _IDLE_PAUSE_S
    while is_busy := STEP.is_busy():
        if (left_s := end_s - time.monotonic()) <= 0:
            break
        time.sleep(min(pause_s, left_s))
        pause_s *= 2
    return not is_busy
