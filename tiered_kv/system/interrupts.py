"""Calls that no signal handler interrupts. `StackCalls` and the openings of stacks use them.

Python runs signal handlers in the main thread, between any two steps of the code that runs there. A handler that raises
(Ctrl-C, a timeout by SIGALRM) would leave a lock held, a row taken or a list half changed. So the main thread hands
the calls of a stack to a call thread, and only waits. If the wait is interrupted, the call ends early, and then the
interrupt goes on.

The main thread itself uses only operations that are written in C, so each happens as a whole or not at all:
`SimpleQueue`, `Lock`, and `start_new_thread`. `threading.Event`, `Condition` and `Thread.start` take locks in Python,
which an interrupt leaves held.
"""

from __future__ import annotations

import _thread
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from tiered_kv.errors import ShutdownError
from tiered_kv.system.step import STEP

T = TypeVar("T")

_POLL_S: Final = 0.1
"""How often a waiting thread checks whether the call thread has ended. The end of its call wakes it at once."""

_END_S: Final = 10.0
"""How long an interrupted caller waits for the end of its call. A tier that hangs in a call never lets it end."""


class _AbandonedError(BaseException):
    """Ends the call of an interrupted caller."""


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T], *, is_last: bool = False) -> None:
        self.work = work
        self.is_last = is_last  # the thread ends after it
        self.is_abandoned = False
        self.has_ended = False
        self.results: list[T] = []  # one, or none after an error
        self.error: BaseException | None = None
        self.end = threading.Lock()  # released at the end
        self.end.acquire()

    def run(self) -> None:
        try:
            if self.is_abandoned:
                raise _AbandonedError
            self.results.append(self.work())
        except BaseException as error:
            self.error = error
        self.has_ended = True
        STEP.begin()
        self.end.release()


class CallThread:
    """Runs calls of the main thread, one after the other, on one daemon thread that starts with the first call.

    Calls of other threads run on those threads: no signal handler runs there. The caller's thread also runs calls for
    which no thread can be started, and calls after `stop`. A forked child has no such thread, so there `run` raises
    `ShutdownError`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()  # Any: the thread does not use the results
        self._claim = threading.Lock()  # held by the thread that serves the calls
        self._running: _Call[Any] | None = None
        self._thread: threading.Thread | None = None
        self._ident = 0  # the thread that serves the calls
        self._is_over = False

    def run(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Return the result of `work`, or raise its exception.

        With `undo` the thread ends after the call. If the caller is interrupted, `undo` gets the result.
        """
        self._raise_if_forked()
        if threading.get_ident() != threading.main_thread().ident or self._is_over or sys.is_finalizing():
            return work()
        call = _Call(work)
        try:
            if self._start():
                # Workers of tiers give way to both threads, which would else wait for the interpreter lock.
                STEP.begin()
                self._calls.put(call)
                self._await(call)
                STEP.end(is_scheduler=False)
                if undo is not None:
                    self.stop()
        except BaseException:
            call.is_abandoned = True
            # Behind the call in the queue. So the call has ended when this one runs.
            last = _Call(lambda: [undo(each) for each in call.results if undo], is_last=undo is not None)
            if self._start():
                self._calls.put(last)
                self._await(last, _END_S)
            if not last.has_ended and self._running is None:  # the thread had ended before
                last.run()
            raise
        if not call.has_ended:
            call.is_abandoned = True  # it may still be in the queue
            return work()
        if call.error is not None:
            error, call.error = call.error, None
            try:
                raise error
            finally:
                del error  # the error's traceback keeps this frame, and the frame would keep the error
        return call.results[0]

    def check(self) -> None:
        """End the call that runs on this thread, if its caller was interrupted."""
        call = self._running
        if call is not None and call.is_abandoned and threading.get_ident() == self._ident:
            raise _AbandonedError

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if not self._is_over:
            self._calls.put(_Call(lambda: None, is_last=True))
        if thread.is_alive():
            thread.join()

    def _start(self) -> bool:
        """Return whether there is a thread, or one has been started."""
        try:
            if not self._ident:
                _thread.start_new_thread(self._launch, ())
        except (RuntimeError, MemoryError):
            return False
        return True

    def _launch(self) -> None:
        """Start the thread that serves the calls, unless there is one."""
        if self._claim.acquire(blocking=False):
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                self._thread = thread
                thread.start()
            except (RuntimeError, MemoryError):  # give the call back: its caller runs it, and the next one tries again
                self._thread = None
                self._claim.release()
                with suppress(Empty):
                    self._calls.get(timeout=_POLL_S).end.release()

    def _serve(self) -> None:
        self._ident = threading.get_ident()
        while not self._is_over:
            call = self._running = self._calls.get()
            if not call.has_ended:
                call.run()
            self._running = None
            self._is_over = call.is_last
            del call  # and the objects that its work refers to

    def _await(self, call: _Call[T], timeout_s: float = math.inf) -> None:
        """Wait until a call has ended, or cannot run on the thread, at most about `timeout_s`."""
        while not call.end.acquire(timeout=_POLL_S) and timeout_s > 0:
            self._raise_if_forked()  # a signal handler may fork
            if self._is_over or not self._start():
                return
            timeout_s -= _POLL_S

    def _raise_if_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ShutdownError(f"this belongs to process {self._pid}; open another one after a fork")
