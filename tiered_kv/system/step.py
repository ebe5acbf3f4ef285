"""The step of the scheduler, in which the workers of this process give way.

A thread that needs CPython's interpreter lock waits up to `sys.getswitchinterval()` (5 ms) until the holder must
release it. A scheduler that loses the lock within a step would wait that long for a worker that computes. So the
manager marks its step on the scheduler's thread, and each worker pauses between two blocks while a step runs:

    scheduler: STEP.begin() ... on_schedule_end: STEP.end()
    worker:    give_way(), load or store a block, give_way(), ...

The engine's thread computes outside of the manager's step too: it launches the model's kernels, and handles tokens. No
request waits for a store. So before a store, a worker waits until the engine's thread is idle, judged by that thread's
CPU clock:

    worker:    wait_for_idle(...), give_way(), store a block, ...

What must stay true: a worker's pauses are limited, also if a step never ends or the engine is always busy.
"""

from __future__ import annotations

import threading
import time

PAUSES_MAX = 200
"""Limit of the pauses that all workers together make after the last `STEP.begin`. So a step that never calls
`on_schedule_end` delays the workers by 20 ms at most: the pauses of the limit, each of `PAUSE_S`."""
PAUSE_S = 0.0001
"""Seconds that a worker of the hot path pauses at a time."""
IDLE_WAIT_S_MAX = 0.02
"""Limit of the seconds that one `wait_for_idle` lasts, however busy the engine is."""
_IDLE_PAUSE_S = 0.001
"""Seconds of the first pause of `wait_for_idle`; each further pause is twice as long."""
_SAMPLE_S_MIN = 0.0002
"""The shortest time over which the CPU clock tells a busy thread from an idle one."""
_BUSY_SHARE = 0.5
"""A thread is busy if it computes for more than this share of the time."""


class Step:
    """The step of this process's scheduler. It needs no lock: a race of two workers miscounts by one pause."""

    __slots__ = ("_clock_id", "_is_busy", "_sampled_s", "_thread", "_used_s", "pauses_left")

    def __init__(self) -> None:
        self.pauses_left = 0
        """How many pauses the workers may still make in this step; 0 if no step runs. Workers count it down."""
        self._thread = 0
        """The identity of the thread that last called `end` as a scheduler; 0 before."""
        self._clock_id: int | None = None
        """The CPU clock of the scheduler's thread; None while no such thread is known."""
        self._is_busy = False
        self._sampled_s = self._used_s = 0.0

    def begin(self) -> None:
        """Let workers pause until the step ends. Every call of the manager within a step calls `begin` again."""
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
            except OSError:  # the thread has ended, or was the parent process's: a new thread may have its identity
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
