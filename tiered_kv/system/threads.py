"""Threads: they start, which the system may refuse, and they run calls and background tasks.

Any room starts its threads here, from any thread. A system refuses a thread at its limit of processes, or of memory:
then `ResourceError` is raised. What must stay true: a call that was refused never runs, and no thread keeps a process
from ending.
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
from tiered_kv.system.interrupts import CallThread

_log = logging.getLogger(__name__)

Item = TypeVar("Item")
P = ParamSpec("P")
T = TypeVar("T")


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

    `undo` gets a result that comes too late, or after an exception of the waiting thread. A signal handler that raises
    in the main thread leaves no thread hanging: see `CallThread`.

    Raises:
        TimeoutError: `work` has not ended in time. The thread of `work` is left behind.
        ResourceError: The system gives no thread.
    """
    if threading.current_thread() is threading.main_thread():
        call = partial(_call_within, limit_s, work, name, undo)
        return CallThread(f"{name}-call").run(call, undo=undo or _keep)
    return _call_within(limit_s, work, name, undo)


def _call_within(limit_s: float, work: Callable[[], T], name: str, undo: Callable[[T], object] | None) -> T:
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
        del future  # the traceback of an error of `work` keeps this frame: its variable `future` would keep the error


def _keep(result: object) -> None:
    """Undo nothing."""


def _undo(undo: Callable[[Any], object], future: Future[Any]) -> None:  # Any: the result of a call
    if future.exception() is None:
        undo(future.result())


class DaemonThreads(Executor):
    """Runs calls on daemon threads. A call that is refused never runs.

    The standard library's executor queues a call before it starts a thread for it. If the start fails, it raises, but
    still runs the call later: on memory that others use by then. It would also wait at exit for calls that hang.

    Each of the first `threads_max` calls starts a thread. Callers limit how many calls they make at once, so the queue
    needs no limit. Any thread may call.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()  # Any: a call's result
        self._lock = threading.Lock()
        """Guards `_threads` and `_is_shut_down`. A thread holds it for assignments and the start of a thread."""
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
        """Let the threads end when the queue is empty; `cancel_futures` empties the queue. Only `join` waits."""
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
            del call, future, function  # they hold views of the region, which the wait would keep


class BackgroundTask:
    """Runs an action soon after a request; one run serves all requests before it. Exceptions are logged only.

    There is at most one thread, called `name`, which ends with the action: an action that hangs blocks nothing else. If
    no thread can be started, the action is not run, and its owner must have another way to run it.
    """

    def __init__(self, action: Callable[[], None], name: str) -> None:
        self._action = action
        self._name = name
        self._lock = threading.Lock()
        """Guards `_is_asked` and `_thread`. A thread holds it for assignments and the start of a thread."""
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
            except BaseException:  # SystemExit too: if it ended this thread, later requests would not run
                with suppress(Exception):  # a handler of the log may raise
                    _log.exception("%s failed", self._name)
