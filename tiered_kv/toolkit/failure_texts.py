"""The last failures of a tier, in sentences: the log of an outage names them.

Workers note failures, and the scheduler's thread reads their texts. No text older than a minute is returned, so the
text of an earlier outage never explains the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

AGE_MAX_S: Final = 60.0
KINDS_MAX: Final = 64
"""Reasons whose texts are kept; further reasons are ignored."""
OF_LOOKUPS: Final = ""
"""Stands for failures of lookups, whatever their reason."""


class FailureTexts:
    """The newest text by reason. Any thread may call: each call reads or writes one entry of a dict."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._texts: dict[str, tuple[str, float]] = {}

    def note(self, reason: str, text: str) -> None:
        if reason in self._texts or len(self._texts) < KINDS_MAX:
            self._texts[reason] = text, self._clock()

    def of(self, reason: str) -> str | None:
        """Return the text for a reason, or for `OF_LOOKUPS`; None without a text that is young enough."""
        found = self._texts.get(reason)
        if found is None:
            return None
        text, noted_s = found
        return text if self._clock() - noted_s <= AGE_MAX_S else None
