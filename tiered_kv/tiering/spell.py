"""A spell: a state that begins and ends. The log has a line for each beginning and each end.

`Outages` keeps one for a tier's outage and one for a full storage, on the manager's thread. If a state comes again and
again, the first spells are logged, then one a minute. The next line says how many were left out. If a spell that was
left out lasts, its line follows as soon as the limit permits. So the last line always says the present state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tiered_kv.system.log_limit import LogLimit

LOGGED_AT_ONCE: Final = 6  # spells before the limit of one for each pause
LOGGED_PAUSE_S: Final = 60.0


class Lost(NamedTuple):
    """Blocks that a tier did not store or load, since the process began."""

    stores: int
    loads: int

    def since(self, before: Lost) -> Lost:
        return Lost(self.stores - before.stores, self.loads - before.loads)


class Spell:
    """One kind of spells. One thread calls; `now_s` is in seconds of its clock.

    Args:
        head: The first words of the line for a beginning.
        what: The noun for several spells.
        say: Logs a line; returns at once.
    """

    def __init__(self, head: str, what: str, say: Callable[[str], None]) -> None:
        self._head = head
        self._what = what
        self._say = say
        self._now_s = 0.0
        self._limit = LogLimit(LOGGED_PAUSE_S, LOGGED_AT_ONCE, lambda: self._now_s)
        self.is_on = self._is_logged = False
        self._begun_s = 0.0
        self._about = ""
        self._before = Lost(0, 0)
        """The losses when the spell began."""
        self._unsaid = 0  # spells that were left out since the last line

    def begin(self, now_s: float, about: str, lost: Lost) -> None:
        """Note that a spell begins; `about` ends the line of the log, `lost` are the losses so far."""
        self.is_on, self._is_logged = True, False
        self._begun_s, self._about, self._before = now_s, about, lost
        self.go_on(now_s)

    def go_on(self, now_s: float) -> None:
        """Log a spell that was not logged when it began, if it may be logged now."""
        self._now_s = now_s
        if self._is_logged or self._limit.take() is None:
            return
        self._is_logged = True
        again = f" ({self._unsaid} {self._what} before it were not logged)" if self._unsaid else ""
        self._unsaid = 0
        self._say(f"{self._head}{again}: {self._about}")

    def end(self, now_s: float, lost: Lost, line: Callable[[float, Lost], str]) -> None:
        """Note that the spell ends. If its beginning was logged, log `line` with its seconds and its losses."""
        if self.is_on:
            self.is_on = False
            self._unsaid += not self._is_logged
            if self._is_logged:
                self._say(line(now_s - self._begun_s, lost.since(self._before)))
