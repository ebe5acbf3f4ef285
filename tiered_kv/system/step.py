"""The step of the scheduler, in which the workers of this process give way.

A thread that needs CPython's interpreter lock waits up to `sys.getswitchinterval()` (5 ms) until the holder must
release it. A scheduler that loses the lock within a step would wait that long for a worker that computes. So the
manager marks its step on the scheduler's thread, and each worker pauses between two blocks while a step runs:

    scheduler: STEP.begin() ... on_schedule_end: STEP.end()
    worker:    give_way(), load or store a block, give_way(), ...

The engine's thread computes outside of the manager's step too: it launches the model's kernels, and handles tokens. No
request waits for a store. So before a store, and between its blocks, a worker waits until the engine's thread is idle,
judged by that thread's CPU clock. It waits as long as it may, which its owner says for each part:

    worker:    IDLE_WAIT.left_s = ..., wait_for_idle(), store a block, give_way(), store a block, ...

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
IDLE_WAIT_S_MAX = 1.0
"""Limit of the seconds that work waits until the engine is idle. An engine that generates hardly pauses, until a prompt
comes: then it waits for the GPU for long."""
_IDLE_PAUSE_S, _IDLE_PAUSE_S_MAX = 0.002, 0.008
"""Seconds of the first pause of `wait_for_idle` beside a busy engine, and of each further one."""
_SAMPLE_S_MIN, _SAMPLE_S_MAX = 0.0002, 0.003
"""The shortest time over which the CPU clock tells a busy thread from an idle one, and the longest: over a longer time
it tells what the thread did before."""
_BUSY_SHARE = 0.2
"""A thread is busy if it computes for more than this share of the time. One that waits again and again for the
interpreter lock is not idle, though it computes less than it waits."""


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
        self._is_busy: bool | None = False
        self._sampled_s = self._used_s = 0.0

    def begin(self) -> None:
        """Let workers pause until the step ends. Every call of the manager within a step calls `begin` again."""
        self.pauses_left = PAUSES_MAX

    def end(self, *, is_scheduler: bool = True) -> None:
        """Let workers go on. If the calling thread is a scheduler's, `is_busy` reads its CPU clock from now on."""
        self.pauses_left = 0
        if is_scheduler and ((thread := threading.get_ident()) != self._thread or self._clock_id is None):
            self._clock_id, self._thread = time.pthread_getcpuclockid(thread), thread

    def is_busy(self) -> bool | None:
        """Return whether the scheduler's thread has computed since the last call.

        None if that is too long ago to tell what the thread does now: ask again after `_SAMPLE_S_MIN`.
        """
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
            computed_s = used_s - self._used_s
            if computed_s <= _BUSY_SHARE * min(passed_s, _SAMPLE_S_MAX):
                self._is_busy = False
            else:
                self._is_busy = True if passed_s <= _SAMPLE_S_MAX or 2 * computed_s > passed_s else None
            self._sampled_s, self._used_s = now_s, used_s
        return self._is_busy


STEP = Step()


class _IdleWait(threading.local):
    """For how long the calling thread may still wait until the engine's thread is idle; 0 for most threads."""

    left_s = 0.0


IDLE_WAIT = _IdleWait()
_WAITING = threading.Lock()
"""Held by the one thread that watches the engine's: each look takes the interpreter lock from it."""


def give_way(pause_s: float = PAUSE_S) -> None:
    """Pause while a scheduler's step runs. Workers call this between two blocks, without holding a lock.

    A thread that may wait also does so while the engine's thread computes. It costs less than 100 ns if no step runs.
    Background work passes a longer `pause_s`: each thread that wakes takes the interpreter lock from the scheduler. So
    fewer pauses cost the step less.
    """
    if STEP.pauses_left > 0:
        STEP.pauses_left -= 1
        time.sleep(pause_s)
    elif IDLE_WAIT.left_s > 0.0:
        wait_for_idle()


def wait_for_idle() -> None:
    """Wait while the scheduler's thread computes, as long as the calling thread may."""
    if IDLE_WAIT.left_s <= 0.0 or STEP.is_busy() is False:
        return
    end_s = time.monotonic() + IDLE_WAIT.left_s
    if _WAITING.acquire(timeout=IDLE_WAIT.left_s):
        try:
            _watch(end_s)
        finally:
            _WAITING.release()
    IDLE_WAIT.left_s = max(0.0, end_s - time.monotonic())


def _watch(end_s: float) -> None:
    """Return when the scheduler's thread is idle, or at `end_s`."""
    pause_s = _IDLE_PAUSE_S
    while (is_busy := STEP.is_busy()) is not False and (left_s := end_s - time.monotonic()) > 0.0:
        if is_busy:
            time.sleep(min(pause_s, left_s))
            pause_s = _IDLE_PAUSE_S_MAX
        else:
            time.sleep(min(_SAMPLE_S_MIN, left_s))
