"""The scheduler's step, and how workers give way to it.

A thread that needs CPython's interpreter lock waits up to `sys.getswitchinterval()` (5 ms) until the holder must
release it. A scheduler that loses the lock within a step would wait that long for a worker that computes. So the
manager marks its step, and each worker pauses between two blocks while a step runs:

    scheduler: STEP.pauses_left = PAUSES_MAX ... on_schedule_end: STEP.pauses_left = 0
    worker:    give_way(), load or store a block, give_way(), ...

The engine's thread computes outside of the manager's step too: it launches the model's kernels, and handles tokens. So
before work that no request waits for, as a store, a worker waits until that thread waits itself, which its CPU clock
shows:

    worker:    wait_for_idle(...), give_way(), store a block, ...
"""

from __future__ import annotations

import threading
import time

PAUSES_MAX = 200
"""Pauses of all workers after the last mark. A step without `on_schedule_end` delays them by 20 ms at most."""
PAUSE_S = 0.0001
IDLE_WAIT_S_MAX = 0.02
"""How long one `wait_for_idle` lasts at most, however busy the engine is."""
_IDLE_PAUSE_S = 0.001
_SAMPLE_S_MIN = 0.0002
"""The shortest time over which the CPU clock tells a busy thread from an idle one."""
_BUSY_SHARE = 0.5


class Step:
    """The step of this process's scheduler. It needs no lock: a race of two workers miscounts by one pause."""

    __slots__ = ("_clock_id", "_is_busy", "_sampled_s", "_thread", "_used_s", "pauses_left")

    def __init__(self) -> None:
        self.pauses_left = 0
        """Above 0 while a step runs; the scheduler's thread sets it, and workers count it down."""
        self._thread = 0
        self._clock_id: int | None = None
        self._is_busy = False
        self._sampled_s = self._used_s = 0.0

    def end(self) -> None:
        """Note the end of a step. The scheduler's thread calls this."""
        self.pauses_left = 0
        if (thread := threading.get_ident()) != self._thread or self._clock_id is None:
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
    the interpreter from the scheduler, so fewer pauses cost the step less.
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
