"""The timer of scheduler steps: how long the manager's calls take in one step of 128.

The manager marks its methods with `timed`. The manager's thread owns the timer; any thread may read its histogram. In
all other steps a timed call costs one test of a flag.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from tiered_kv.metrics.histogram import SHORT_SECONDS, Histogram

EVERY_STEPS: Final = 128
"""The number of steps of which one is timed."""
P = ParamSpec("P")
T = TypeVar("T")


class StepTimer:
    """Sums the time of the calls in one step of `EVERY_STEPS`. The manager's thread owns it; any may read `seconds`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = Histogram(SHORT_SECONDS)
        self.clock = clock
        self.is_on = False  # whether this step is timed, and no timed call runs
        self.spent_s = 0.0
        """Seconds that the ended calls of this step took."""
        self._steps_left = EVERY_STEPS

    def end_step(self, began_s: float) -> None:
        """Note the end of a step, whose last call began at `began_s`."""
        if self.is_on:
            self.seconds.add(self.spent_s + self.clock() - began_s)
            self.spent_s = 0.0
        self._steps_left -= 1
        self.is_on = self._steps_left == 0
        if self.is_on:
            self._steps_left = EVERY_STEPS


def timed(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Time a method in the timed steps; its object has a `step_timer`. It counts once if another timed method calls it.

    A `lookup` of one key is not timed: reading the clock takes longer than the call.
    """

    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **named: P.kwargs) -> T:  # Any: the manager's module imports this one
        timer: StepTimer = self.step_timer
        if not timer.is_on:
            return method(self, *arguments, **named)
        timer.is_on, began_s = False, timer.clock()
        try:
            return method(self, *arguments, **named)
        finally:
            timer.is_on, timer.spent_s = True, timer.spent_s + timer.clock() - began_s

    return call
