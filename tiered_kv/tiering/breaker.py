"""The circuit breaker of a guarded tier: a tier that failed several times in a row gets no jobs and no lookups.

`GuardedTier` and `Search` report successes and failures to it, on the scheduler's thread. While it is open, no job and
no lookup reaches the tier. After a pause, one job at a time may probe the tier, so an outage ends without an operator.
"""

from __future__ import annotations

from enum import Enum


class BreakerState(Enum):
    """The value is `breaker_state` in the counters."""

    CLOSED = 0
    """The tier is in use."""
    OPEN = 2
    """The tier is not in use: it failed too often in a row."""
    HALF_OPEN = 1
    """One job at a time may probe whether the tier works again."""


class Breaker:
    """Opens after `failures_max` failures in a row, half-opens after `cooldown_s`. Owned by the manager's thread."""

    def __init__(self, failures_max: int, cooldown_s: float) -> None:
        self.state = BreakerState.CLOSED
        self.times_opened = 0
        self.cause = ""  # the known cause of the last failure since a success
        self._failures_max = failures_max
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._opened_at_s = 0.0

    def succeed(self) -> None:
        """Note that a job succeeded, and close the breaker."""
        self._failures = 0
        self.cause = ""
        self.state = BreakerState.CLOSED

    def fail(self, now_s: float, cause: str = "") -> None:
        """Note that a job or lookup failed, or was not answered in time; `cause` says why, for the log."""
        self.cause = cause or self.cause
        if self.state is BreakerState.OPEN:
            return  # a job from before the breaker opened has failed: the probe must not be delayed
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= self._failures_max:
            self.times_opened += 1
            self.state = BreakerState.OPEN
            self._opened_at_s = now_s

    def answer(self) -> None:
        """Note that the tier has reported an expired job; an open breaker lets a probe through now."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def tick(self, now_s: float) -> None:
        """Let a probe through if the cooldown is over."""
        if self.state is BreakerState.OPEN and now_s - self._opened_at_s >= self._cooldown_s:
            self.state = BreakerState.HALF_OPEN
