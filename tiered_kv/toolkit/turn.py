"""Turns: one worker at a time in the interpreter, so that the scheduler never queues behind several.

A thread that wants CPython's interpreter lock waits for the one that holds it, and then competes with every other
thread that waits. With many workers whose jobs end at the same time the scheduler's thread would wait for several of
them, each for the Python part of its job. A worker that takes its turn first waits on an ordinary lock instead. So the
scheduler finds one competitor at most, whatever the number of workers, and waits for one Python part of one job.

    with TURN:                      # on a worker's thread
        plan the job                # Python
        with TURN.paused():
            os.preadv(...)          # the kernel, without the interpreter
        verify what came            # Python

The price is that a worker which stalls inside its turn stalls all the others. Take a turn around code of one's own that
only computes, and pause it for everything that may wait: system calls, locks that are held for long, codecs.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext


class Turn:
    """A lock that its holder can put down for a while. Any thread; not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._pause = _Pause(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._holder = 0
        self._lock.release()

    def forget_holder(self) -> None:
        """Begin anew in a forked child: a thread that had its turn at the fork is not there to give it back."""
        self._lock = threading.Lock()
        self._holder = 0

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which this thread does not have its turn; nothing changes for one that has none."""
        return self._pause if self._holder == threading.get_ident() else _NOTHING


class _Pause(AbstractContextManager[None]):
    """Gives the turn up on entering and waits for it on leaving. Stateless, so one serves every thread."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        self._turn.__exit__()

    def __exit__(self, *error: object) -> None:
        self._turn.__enter__()


_NOTHING: AbstractContextManager[None] = nullcontext()

TURN = Turn()
"""The turn of this process's workers, of all tiers together."""

os.register_at_fork(after_in_child=TURN.forget_holder)
