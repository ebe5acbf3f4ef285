"""Calls of a manager by a program with several threads.

An engine drives the manager from its scheduler's thread. For other programs, one lock serializes the calls of the
manager. It is never held while blocks are copied or waited for.

The main thread's calls run on a thread of their own, so that a signal handler that raises leaves the manager whole.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Generic, Self, TypeVar

from tiered_kv.base import ReqContext
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ShutdownError
from tiered_kv.hints import HINTS_KEY
from tiered_kv.system.interrupts import CallThread
from tiered_kv.tiering.interface import CalledManager

HintsAsGiven = Mapping[str, object] | None
T = TypeVar("T")

PAUSE_MIN_S = 50e-6
_PAUSE_MAX_S = 2e-3
_CLOSE_MAX_S = threading.TIMEOUT_MAX / 2
"""The longest wait for a lock: a lock takes no longer one, and no `math.inf`."""
M = TypeVar("M", bound=CalledManager)


class StackCalls(Generic[M]):
    """The base of a stack's calls: their lock, their steps, and their end.

    Args:
        manager: The manager. Either this object's callers use it, or an engine does, never both.
        region: The primary tier's memory.
    """

    def __init__(self, manager: M, region: PrimaryRegion) -> None:
        self._manager = manager
        # Not its array: an array that is kept would keep the memory mapped after the region was closed.
        self.region = region
        self._lock = threading.Lock()
        """Guards the manager, `_calls` and `_is_shut_down`."""
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._is_closed = False  # no call begins, and running calls end at their next step
        self._is_shut_down = False  # the manager is gone
        self._pid = os.getpid()
        self._request_numbers = itertools.count()
        self._call_thread = CallThread("tiered-kv-calls")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout: float = 5.0) -> None:
        """Wait for calls and for transfers, `timeout` seconds each at most, and close every tier.

        A call that takes several steps ends with `ShutdownError` at its next step. If a call still copies blocks after
        `timeout`, the memory stays mapped while the stack is referenced. A second call does nothing, and so does a call
        in a forked child.
        """
        if os.getpid() != self._pid:  # files, sockets and the ends of transfers are the parent's
            return
        timeout_s = min(end_of(timeout) - time.monotonic(), _CLOSE_MAX_S)
        self._is_closed = True
        self._call_thread.run(lambda: self._close(timeout_s))
        self._call_thread.stop()

    # On the call thread or a thread of the program.

    def _close(self, timeout: float) -> None:
        with self._lock:
            self._idle.wait_for(lambda: self._calls == 0, timeout)
            if not self._is_shut_down:
                self._is_shut_down = True
                self._manager.shutdown(timeout)

    def _step(self) -> int:
        """Let the manager collect finished jobs; return how many are still in flight."""
        with self._lock:
            self._raise_if_closed()
            self._manager.on_schedule_end()
            return self._manager.jobs_in_flight

    def _wait(self, is_over: Callable[[], bool], end_s: float) -> bool:
        """Step until `is_over()` is true; return whether that happened in time. The lock is held when it is called."""
        pause_s = PAUSE_MIN_S
        while True:
            with self._lock:
                self._raise_if_closed()
                if is_over():
                    return True
                self._manager.on_schedule_end()
            if time.monotonic() >= end_s:
                return False
            pause_s = self._pause(pause_s)

    def _pause(self, pause_s: float) -> float:
        """Wait this long for the event that a call needs, and return how long to wait the next time."""
        return pause(pause_s)

    def _run(self, call: Callable[[], T]) -> T:
        self._raise_if_closed()  # the check comes before the lock, which `close` holds until the manager is shut down
        return self._call_thread.run(call)  # raises in a forked child, where a lock may be held for ever

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a running call, so that `close` can wait for it."""
        with self._lock:
            self._raise_if_closed()
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._idle.notify_all()

    @contextmanager
    def _request(self, verb: str, hints: HintsAsGiven, epoch: int | None = None) -> Iterator[ReqContext]:
        """Make one request of the manager for a call; `epoch` is its epoch, by default the current one."""
        context = ReqContext(f"{verb}-{next(self._request_numbers)}", None if hints is None else {HINTS_KEY: hints})
        with self._call():
            with self._lock:
                self._manager.on_new_request(context)
                if epoch not in (None, self._manager.epoch):
                    self._manager.outdate(context)
            try:
                yield context
            finally:
                with self._lock:
                    if not self._is_shut_down:
                        self._manager.on_request_finished(context)
                        self._manager.on_schedule_end()

    def _raise_if_closed(self) -> None:
        self._call_thread.check()
        if self._is_closed:
            raise ShutdownError("the stack is closed")

    def _raise_if_shut_down(self) -> None:
        if self._is_shut_down:
            raise ShutdownError("the stack was closed before this call had ended")


def end_of(timeout: float) -> float:
    """Return when, by `time.monotonic`, a call that begins now has to end: never for `math.inf`, now below 0.

    Raises:
        TypeError, ValueError: It is no number of seconds, such as None or NaN: a call would wait without a limit.
    """
    if type(timeout) is not float and not isinstance(timeout, Real):  # the first is faster
        raise TypeError(f"a timeout is a number of seconds, math.inf for no limit; found {timeout!r}")
    seconds = float(timeout)
    if math.isnan(seconds):
        raise ValueError("a timeout is a number of seconds, math.inf for no limit; found NaN")
    return time.monotonic() + max(0.0, seconds)


def pause(pause_s: float) -> float:
    """Sleep, and return how long to sleep the next time."""
    time.sleep(pause_s)
    return min(2 * pause_s, _PAUSE_MAX_S)
