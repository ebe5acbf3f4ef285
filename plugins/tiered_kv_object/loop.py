"""Runs a coroutine of obstore on the thread that calls it, in an event loop without descriptors.

`ObjectClient` calls it for each request that must be cancellable, on any thread. A loop of asyncio's own takes more of
the processor than such a request: an epoll and two sockets, and a write and a read for each wake-up. If threads kept
theirs, each would have to be closed with its thread, and a fork would share its epoll. Here a wake-up is a call that
waits in a queue.

What must stay true: `run_within` returns after the coroutine has ended, or `GRACE_S` after its limit, if the coroutine
does not end then. After that nobody runs what obstore's threads still put into the queue.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
import queue
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar, TypeVarTuple

GRACE_S: Final = 5.0
"""How long a coroutine that was cancelled may take to end. One that does not is left."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_within(coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Return the coroutine's result, or raise its exception. After `limit_s` cancel it, and raise `TimeoutError`."""
    outer, loop = asyncio._get_running_loop(), _RequestLoop()  # type: ignore[abstract]  # the rest is not called
    task = None if outer is None else asyncio.current_task(outer)
    if outer is not None and task is not None:
        asyncio.tasks._leave_task(outer, task)  # from Python 3.14 on, a thread runs one task, of whichever loop
    asyncio._set_running_loop(loop)
    try:
        return loop.run(coroutine, limit_s)
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None and task is not None:
            asyncio.tasks._enter_task(outer, task)


class _RequestLoop(asyncio.AbstractEventLoop):
    """What obstore, and asyncio's tasks, futures and timeouts, need of an event loop."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[asyncio.Handle] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap; the number tells equal times apart
        self._numbers = itertools.count()

    def run(self, coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
        task = asyncio.Task(coroutine, loop=self)
        self.call_later(limit_s, task.cancel)
        end_s = self.time() + limit_s + GRACE_S
        try:
            while not task.done() and self.time() < end_s:
                self._run_next(end_s)
        finally:
            task.cancel()  # after an interrupt
            self._timers.clear()
            left = self._calls.qsize() if self.time() >= end_s else math.inf  # a task may call itself without an end
            while left > 0 and not self._calls.empty():  # so obstore ends a request whose future was cancelled
                self._run_next(end_s)
                left -= 1
        if not task.done():
            with suppress(Exception):  # of its `finally` blocks
                coroutine.close()
            raise TimeoutError
        if task.cancelled():
            raise TimeoutError
        try:
            return task.result()
        finally:
            del task  # or its exception would keep it, and it the exception

    def _run_next(self, end_s: float) -> None:
        """Run a call, and the timers that are due; wait for the first of both, until `end_s` at most."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        next_s = min(end_s, self._timers[0][0]) if self._timers else end_s
        with suppress(queue.Empty):
            self._calls.get(timeout=max(0.0, next_s - self.time()))._run()
        while self._timers and self._timers[0][0] <= self.time():
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                timer._run()

    # obstore and asyncio call these; obstore the first from its threads.

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._calls.put(handle)
        return handle

    call_soon = call_soon_threadsafe

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # `_run_next` skips it

    def time(self) -> float:
        return time.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:  # Any: as in `asyncio.Task`
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        pass  # its text may quote a URL with a signature; a request whose call failed ends after `limit_s`
