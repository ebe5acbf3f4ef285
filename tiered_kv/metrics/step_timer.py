"""The manager's share of a scheduler's step, measured in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tiered_kv.metrics.histogram import SHORT_SECONDS, Histogram

EVERY_STEPS: Final = 128
"""One step in so many is timed. The others cost one subtraction and one comparison."""
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
    """Times all calls of one step in `EVERY_STEPS`: for that step, wrappers hide the manager's methods.

    A caller that keeps a bound method from before is not timed. All methods belong to the manager's thread; any thread
    may read `seconds`, a histogram of the timed steps.

    Args:
        manager: The object whose methods are timed; it calls `count_step` at the end of each step.
    """

    def __init__(self, manager: object, clock: Callable[[], float]) -> None:
        self.seconds = Histogram(SHORT_SECONDS)
        self._clock = clock
        self._attributes = manager.__dict__
        self._manager = manager
        self._steps_left = EVERY_STEPS
        self._wrappers: dict[str, tuple[Callable[..., Any], Any]] = {}  # with the attribute that it hides, or None
        self._spent_s = 0.0
        self._is_inside = False

    def count_step(self) -> None:
        """Note the end of a step."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._steps_left = EVERY_STEPS
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
            if self._attributes.get(name) is not wrapper:  # the manager has replaced it
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
