"""The time that the manager takes of a scheduler's step, measured in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tiered_kv.observe.histogram import SHORT_SECONDS, Histogram

EVERY_STEPS: Final = 128
"""One step in so many is timed. The others pay one addition and one comparison."""
_TIMED: Final = (
    "lookup",
    "lookup_many",
    "prefetch",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "touch",
    "on_new_request",
    "on_request_finished",
    "take_events",
    "on_schedule_end",
)
"""The manager's methods that a step calls."""


class StepTimer:
    """Times all calls of one step in `every` by putting a wrapper before each method for that step only.

    A caller that keeps a bound method from before is not timed. All methods belong to the manager's thread; `seconds`
    may be read by any.

    Args:
        manager: The object whose methods are timed; it calls `count_step` at the end of each step.
        every: One step in so many is timed.

    Attributes:
        seconds: How long the timed steps took.
    """

    def __init__(self, manager: object, clock: Callable[[], float], every: int = EVERY_STEPS) -> None:
        self.seconds = Histogram(SHORT_SECONDS)
        self._clock = clock
        self._attributes = manager.__dict__
        self._manager = manager
        self._every = every
        self._steps_left = every
        self._wrappers: dict[str, tuple[Callable[..., Any], Any]] = {}  # and what it hides in the object, or None
        self._spent_s = 0.0
        self._is_inside = False

    def count_step(self) -> None:
        """Note that a step ends; the next one may be timed."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._steps_left = self._every
            if not self._wrappers:
                self._install()

    def _install(self) -> None:
        self._spent_s = 0.0
        for name in _TIMED:
            wrapper = self._timed(getattr(self._manager, name), name == "on_schedule_end")
            self._wrappers[name] = wrapper, self._attributes.get(name)
            self._attributes[name] = wrapper

    def _remove(self) -> None:
        for name, (wrapper, hidden) in self._wrappers.items():
            if self._attributes.get(name) is not wrapper:  # the manager has put something of its own there
                continue
            if hidden is None:
                del self._attributes[name]
            else:
                self._attributes[name] = hidden
        self._wrappers.clear()

    def _timed(self, method: Callable[..., Any], is_last: bool) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:  # one of the manager's methods calls another
                return method(*arguments, **named)
            self._is_inside = True
            began_s = self._clock()
            try:
                return method(*arguments, **named)
            finally:
                self._spent_s += self._clock() - began_s
                self._is_inside = False
                if is_last and self._wrappers:
                    self._remove()
                    self.seconds.add(self._spent_s)

        return timed
