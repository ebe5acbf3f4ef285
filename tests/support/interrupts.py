"""Interrupts of a call: an exception at each step of the thread that calls, as a signal handler raises it."""

from __future__ import annotations

import dis
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_CHECKED = frozenset(op for name, op in dis.opmap.items() if name in ("RESUME", "JUMP_BACKWARD"))
_CALLS = frozenset(op for name, op in dis.opmap.items() if name.startswith("CALL"))


class Interrupt(Exception):
    """What a handler of SIGALRM raises."""


class _Interrupter:
    """A trace function that raises `error` before the instruction with this number.

    With `where_handlers_run`, only instructions before which CPython may run a signal handler count: the first of a
    function, those that jump back, and those after a call of a function that is written in C.
    """

    def __init__(self, error: BaseException, number: int, where_handlers_run: bool) -> None:
        self.has_hit = False
        self.is_armed = False
        self._error = error
        self._left = number
        self._where_handlers_run = where_handlers_run
        self._last: tuple[FrameType, int] | None = None  # the last event, if it was an instruction

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:  # Any: as `sys.settrace` takes it
        if frame.f_code.co_filename.endswith("_weakrefset.py"):
            return None  # a callback of the garbage collector, whose exceptions are only printed
        if event != "opcode":
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self._last = None
            return self
        operation = frame.f_code.co_code[frame.f_lasti]
        is_after_call = self._last is not None and self._last[0] is frame and self._last[1] in _CALLS
        self._last = frame, operation
        if self.is_armed and (not self._where_handlers_run or operation in _CHECKED or is_after_call):
            self._left -= 1
            if self._left < 0:
                self.has_hit = True
                raise self._error
        return self


Call = Callable[[], object]


def interrupted_at(
    number: int, prepare: Callable[[], Call], error: BaseException, *, where_handlers_run: bool = False
) -> bool:
    """Make a call that is interrupted before an instruction of this thread; return whether it was."""
    interrupter = _Interrupter(error, number, where_handlers_run)
    # CPython 3.12 and later trace the instructions of a function from its second call on, 3.12.1 from the second
    # `settrace` on.
    calls = [prepare() for _ in range(1 + (sys.version_info >= (3, 12)))]
    try:
        for each in calls:
            interrupter.is_armed = each is calls[-1]
            sys.settrace(None)
            sys.settrace(interrupter)
            each()
    except type(error) as raised:
        if raised is not error:
            raise
    finally:
        sys.settrace(None)
    return interrupter.has_hit


def interrupts(prepare: Callable[[], Call], one_in: int = 1, *, where_handlers_run: bool = False) -> Iterator[int]:
    """Interrupt calls, each at another of its instructions, or at one in so many; yield their numbers.

    Args:
        prepare: Returns the next call. It is itself not interrupted.
        where_handlers_run: As of `_Interrupter`.
    """
    for number in itertools.count(0, one_in):
        error = (Interrupt, KeyboardInterrupt)[number // one_in % 2]("interrupted")
        if not interrupted_at(number, prepare, error, where_handlers_run=where_handlers_run):
            return
        yield number


@contextmanager
def signalled(handler: Callable[[int, FrameType | None], None], after_s: float) -> Iterator[None]:
    """Have a handler run in the main thread, once, `after_s` from now: on a busy machine before the block begins, too.

    A handler that raises needs its `pytest.raises` around this block.
    """
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have a handler run in the main thread whenever another thread calls `signal_main_thread`."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def signal_main_thread() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt
