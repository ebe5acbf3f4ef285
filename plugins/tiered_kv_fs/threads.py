"""Threads for calls that may hang: an executor whose threads do not keep the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from tiered_kv.errors import TierUnavailableError

P = ParamSpec("P")
T = TypeVar("T")

_Call = tuple[Future[Any], Callable[[], Any]]  # Any: whatever the call returns


class DaemonThreads(Executor):
    """Runs calls on daemon threads, which the standard library's executor would wait for at exit.

    Threads are started as they are needed. `submit` belongs to one thread; the rest may be called by any.

    Args:
        name: What the threads are called, before their number.
        threads_max: How many there are.
        queue_max: Calls that may wait for a thread; more are an error, since all threads hang then.
    """

    def __init__(self, name: str, *, threads_max: int, queue_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._queue_max = queue_max
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0  # calls that have been submitted and have not ended
        self._lock = threading.Lock()  # guards `_busy`

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call `function`.

        Raises:
            TierUnavailableError: As many calls as may wait are waiting.
        """
        if self._calls.qsize() >= self._queue_max:
            raise TierUnavailableError(f"all {self._threads_max} threads wait for the file system")
        with self._lock:
            self._busy += 1
            needs_thread = self._busy > len(self._threads) and len(self._threads) < self._threads_max
        if needs_thread:
            self._start_thread()
        future: Future[T] = Future()
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return future

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads to be had: do with those there are
            if not self._threads:
                with self._lock:
                    self._busy -= 1
                raise TierUnavailableError("no thread can be started") from error
            return
        self._threads.append(thread)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end once nothing waits; `join` waits for them."""
        for _ in self._threads:
            self._calls.put(None)

    def join(self, deadline: float) -> int:
        """Wait for the threads until `deadline` (of `time.monotonic()`); return how many still run."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._busy -= 1
            del call, future, function  # with them go views of the region
