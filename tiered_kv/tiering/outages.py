"""Outages: one line in the log when a tier's breaker opens, or its storage is full, and one line when that is over.

`GuardedTier` calls this on the scheduler's thread, which does no I/O: a background thread writes the lines. The number
of lines has a limit, which `spell` describes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import rounded_seconds
from tiered_kv.reasons import Fate, Reason
from tiered_kv.system.threads import BackgroundTask
from tiered_kv.tiering.account import TierAccount
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.breaker import Breaker, BreakerState
from tiered_kv.tiering.spell import LOGGED_AT_ONCE, Lost, Spell

_EXPLANATION_CHARACTERS_MAX: Final = 600

_log = logging.getLogger(__name__)


class Outages:
    """The log's lines about one tier. The manager's thread calls; `now_s` is in seconds of the manager's clock.

    Args:
        settings: A tier whose stores find no room for its `breaker_cooldown` is logged as full.
        explain: See `SecondaryTierManager.explain_failure`; any value may come from a tier.
    """

    def __init__(
        self,
        settings: TierSettings,
        account: TierAccount,
        explain: Callable[[str], object],
    ) -> None:
        self.noted_state = BreakerState.CLOSED
        self._account = account
        self._tier = tier = settings.name
        self._cooldown_s = settings.breaker_cooldown
        self._explain = explain
        self._outage = Spell(f"tier '{tier}' is out of use", "outages", self._say)
        self._full = Spell(f"tier '{tier}' is full", "times", self._say)
        self.is_on = False
        """Whether an outage was noted that has not ended."""
        self.cause = ""
        """Why this outage began; "" without one. Any thread may read this."""
        self.lacks_room = False
        """Whether the last store found no room."""
        self._no_room_since_s = 0.0
        self._lines: deque[str] = deque(maxlen=8 * LOGGED_AT_ONCE)
        self._writing = BackgroundTask(self._write, f"tiered-kv-log-{tier}")

    def follow(self, breaker: Breaker, now_s: float) -> None:
        """Note the breaker's state. Called after each change of it, and in each step of an outage."""
        if breaker.state is not self.noted_state:
            self.noted_state = breaker.state
            self._account.notice(f"breaker {breaker.state.name.lower().replace('_', ' ')}")
        self.is_on = breaker.state is not BreakerState.CLOSED
        if not self.is_on:
            self.cause = ""
            self._outage.end(now_s, self._account.lost(), self._works_again)
        elif self._outage.is_on:
            self._outage.go_on(now_s)
        else:
            self.cause = breaker.cause or self._with_explanation("lookups fail, or are not answered in time", "")
            again = f"Its blocks are misses; it is tried again every {rounded_seconds(self._cooldown_s)}"
            self._outage.begin(now_s, f"{self.cause}. {again}", self._account.lost())

    def cause_of(self, is_promotion: bool, reason: Reason, word: str = "") -> str:
        """Return why a job failed, for the log; `word` is the tier's own for the reason, if it has one."""
        explanation = self._explanation(word or reason.value)
        said = reason.sentence if explanation is None else explanation
        return f"{'loads' if is_promotion else 'stores'} fail: {said} ('{word or reason.value}')"

    def note_store(self, is_stored: bool, result: JobResult, now_s: float) -> None:
        """Note the end of a store. The storage counts as full once all stores find no room for `breaker_cooldown`."""
        if is_stored:
            self.lacks_room = False
            self._full.end(now_s, self._account.lost(), self._has_room_again)
        elif result.cause.fate is not Fate.NO_SPACE:
            return
        elif self._full.is_on:
            self._full.go_on(now_s)
        elif not self.lacks_room:
            self.lacks_room, self._no_room_since_s = True, now_s
        elif now_s - self._no_room_since_s >= self._cooldown_s:
            about = "Blocks that it has can be loaded; a store is tried each time"
            self._full.begin(now_s, f"{self.cause_of(False, result.cause, result.word)}. {about}", self._account.lost())

    def disable(self, why: str) -> None:
        self._account.notice(f"disabled: {why}")
        self._say(f"tier '{self._tier}' is not used any more until this process ends: {why}")

    def _works_again(self, seconds: float, lost: Lost) -> str:
        return (
            f"tier '{self._tier}' works again after {rounded_seconds(seconds)}; meanwhile {lost.stores:,} blocks were "
            f"not stored there, and {lost.loads:,} not loaded"
        )

    def _has_room_again(self, seconds: float, lost: Lost) -> str:
        after = f"after {rounded_seconds(seconds)}; meanwhile {lost.stores:,} blocks were not stored there"
        return f"tier '{self._tier}' has room again {after}"

    def _explanation(self, reason: str) -> str | None:
        """Return the tier's words on one line; None if it gives no text with a word."""
        explained = self._explain(reason)
        words = explained.split() if isinstance(explained, str) else []
        return " ".join(words)[:_EXPLANATION_CHARACTERS_MAX] if words else None

    def _with_explanation(self, cause: str, reason: str) -> str:
        explanation = self._explanation(reason)
        return cause if explanation is None else f"{cause}: {explanation}"

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._writing.ask()

    def _write(self) -> None:
        while self._lines:
            _log.warning("%s", self._lines.popleft())
