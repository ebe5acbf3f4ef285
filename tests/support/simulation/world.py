"""Simulated time, and what is due in it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from tiered_kv.testing.clock import ManualClock

_EPOCH_S = 1_000_000.0


class World:
    """The clock, and the calls that are due at some time of it, in an order that depends on nothing else."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.clock._now_s = _EPOCH_S  # the same moment in every run
        self.rng = Random(0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` called once `seconds` have passed."""
        heapq.heappush(self._due, (self.clock() + seconds, next(self._numbers), call))

    def advance(self, seconds: float) -> None:
        """Let time pass, and do on the way what becomes due."""
        end_s = self.clock() + seconds
        while self._due and self._due[0][0] <= end_s:
            at_s, _, call = heapq.heappop(self._due)
            self.clock.advance(at_s - self.clock())
            call()
        self.clock.advance(end_s - self.clock())
