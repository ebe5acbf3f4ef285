"""The last failures of a tier, in sentences: the log of an outage names them.

Workers note them, and the scheduler's thread asks. A text is of the last minute, so the text of an earlier outage is
never given as the cause of the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

AGE_MAX_S: Final = 60.0
KINDS_MAX: Final = 64
"""Reasons that are kept; of further ones nothing is known."""
OF_LOOKUPS: Final = ""
"""In place of a reason: lookups fail, for any reason."""


class FailureTexts:
    """The newest text by reason. Any thread may call: each call reads or writes one entry of a dict."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._texts: dict[str, tuple[str, float]] = {}

    def note(self, reason: str, text: str) -> None:
        if reason in self._texts or len(self._texts) < KINDS_MAX:
            self._texts[reason] = text, self._clock()

    def of(self, reason: str) -> str:
        """Return the text for a reason, or `OF_LOOKUPS`; empty if there is none, or if it is too old."""
        text, noted_s = self._texts.get(reason, ("", 0.0))
        return text if self._clock() - noted_s <= AGE_MAX_S else ""
