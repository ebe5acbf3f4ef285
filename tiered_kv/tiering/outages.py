"""Outages: one line in the log when a tier's breaker opens, and one when it closes again.

`GuardedTier` calls this on the manager's thread, which does no I/O: a background thread writes the lines. Of a tier
that fails again and again, some outages are logged, then one a minute; the next line says how many were left out. If an
outage that was left out lasts, its line follows as soon as it may. So the last line always says how it is now.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tiered_kv.config.units import rounded_seconds
from tiered_kv.log_limit import LogLimit
from tiered_kv.reasons import reason_of
from tiered_kv.threads import BackgroundTask
from tiered_kv.tiering.gates import Breaker, BreakerState

LOGGED_AT_ONCE: Final = 6
LOGGED_PAUSE_S: Final = 60.0

_log = logging.getLogger(__name__)


class Lost(NamedTuple):
    """Blocks that a tier did not store or load, since the process began."""

    stores: int
    loads: int


def cause_of(is_promotion: bool, reason: str) -> str:
    """Return why a job failed, for the log. The reason is a word of the tier's."""
    return f"{'loads' if is_promotion else 'stores'} fail: {reason_of(reason).sentence} ('{reason}')"


class Outages:
    """What the log says of one tier's outages. The manager's thread calls; `now_s` is by its clock."""

    def __init__(self, tier: str, cooldown_s: float, notice: Callable[[str], None] = lambda what: None) -> None:
        self.noted_state = BreakerState.CLOSED
        self._notice = notice
        self._tier = tier
        self._cooldown_s = cooldown_s
        self._now_s = 0.0
        self._limit = LogLimit(LOGGED_PAUSE_S, LOGGED_AT_ONCE, lambda: self._now_s)
        self._begun_s = 0.0
        self._cause = ""
        self._before = Lost(0, 0)
        self.is_on = self._is_logged = False
        self._unsaid = 0
        self._lines: deque[str] = deque(maxlen=4 * LOGGED_AT_ONCE)
        self._writing = BackgroundTask(self._write, f"tiered-kv-log-{tier}")

    def follow(self, breaker: Breaker, now_s: float, lost: Callable[[], Lost]) -> None:
        """Note the breaker's state: each change, and in each step of an outage."""
        if breaker.state is not self.noted_state:
            self.noted_state = breaker.state
            self._notice(f"breaker {breaker.state.name.lower().replace('_', ' ')}")
        if breaker.state is BreakerState.CLOSED:
            self.end(now_s, lost())
        elif self.is_on:
            self.go_on(now_s)
        else:
            self.begin(now_s, breaker.cause or "lookups fail, or are not answered in time", lost())

    def begin(self, now_s: float, cause: str, lost: Lost) -> None:
        """Note that the breaker has opened, and why."""
        self.is_on, self._is_logged = True, False
        self._begun_s, self._cause, self._before = now_s, cause, lost
        self.go_on(now_s)

    def go_on(self, now_s: float) -> None:
        """Log an outage that was not logged when it began, if it may be logged now."""
        self._now_s = now_s
        if self._is_logged or self._limit.take() is None:
            return
        self._is_logged = True
        again = f" ({self._unsaid} outages before it were not logged)" if self._unsaid else ""
        self._unsaid = 0
        self._say(
            f"tier '{self._tier}' is out of use{again}: {self._cause}. Its blocks are misses; it is tried again every "
            f"{rounded_seconds(self._cooldown_s)}"
        )

    def end(self, now_s: float, lost: Lost) -> None:
        """Note that the breaker has closed; log it if its opening was logged."""
        self.is_on = False
        self._unsaid += not self._is_logged
        if self._is_logged:
            stores, loads = (after - before for after, before in zip(lost, self._before, strict=True))
            self._say(
                f"tier '{self._tier}' works again after {rounded_seconds(now_s - self._begun_s)}; meanwhile "
                f"{stores:,} blocks were not stored there, and {loads:,} not loaded"
            )

    def disable(self, why: str) -> None:
        self._notice(f"disabled: {why}")
        self._say(f"tier '{self._tier}' is not used any more until this process ends: {why}")

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._writing.ask()

    def _write(self) -> None:
        while self._lines:
            _log.warning("%s", self._lines.popleft())
