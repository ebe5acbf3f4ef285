"""An executor for calls that may hang: its threads do not keep the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Runs calls on daemon threads. The standard library's executor would wait at exit for calls that hang.

    Each of the first calls starts a thread. Only the event loop's thread submits calls. Callers limit how many calls
    they make at once, so the queue needs no limit.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()  # Any: what it returns
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As in `Executor`; raises `RuntimeError` if there is no thread, and none can be started."""
        if len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # no more threads available: the existing ones must suffice
                if not self._threads:
                    raise
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when the queue is empty; `join` waits for them."""
        for _ in self._threads:
            self._calls.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the threads until `deadline` (of `time.monotonic()`)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, function  # releases their views of the region
