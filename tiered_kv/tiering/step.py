"""The scheduler's step, and how workers give way to it.

A thread that needs CPython's interpreter lock waits up to `sys.getswitchinterval()` (5 ms) until the holder must
release it. A scheduler that loses the lock within a step would wait that long for a worker that computes. So the
manager marks its step, and each worker pauses between two blocks while a step runs:

    scheduler: STEP.pauses_left = PAUSES_MAX ... on_schedule_end: STEP.pauses_left = 0
    worker:    give_way(), load or store a block, give_way(), ...
"""

from __future__ import annotations

import time

PAUSES_MAX = 200
"""Pauses of all workers after the last mark. A step without `on_schedule_end` delays them by 20 ms at most."""
PAUSE_S = 0.0001


class Step:
    """The step of this process's scheduler. It needs no lock: a race of two workers miscounts by one pause."""

    __slots__ = ("pauses_left",)

    def __init__(self) -> None:
        self.pauses_left = 0
        """Above 0 while a step runs; the scheduler's thread sets it, and workers count it down."""


STEP = Step()


def give_way(pause_s: float = PAUSE_S) -> None:
    """Pause while a scheduler's step runs. Workers call this between two blocks, without holding a lock.

    It costs less than 100 ns if no step runs. Background work passes a longer `pause_s`: each thread that wakes takes
    the interpreter from the scheduler, so fewer pauses cost the step less.
    """
    if STEP.pauses_left > 0:
        STEP.pauses_left -= 1
        time.sleep(pause_s)
