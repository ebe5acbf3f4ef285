"""The rest between surveys: what they may take of the servers' time, and of ours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

SURVEY_SHARE: Final = 0.1
"""Of the time, at most, goes into surveys of one namespace, whoever makes them and whatever for."""
REST_S_MAX: Final = 300.0
"""No rest is longer, so surveys that take more than a ninth of it (33 s) take a larger share. What a survey is said to
have taken may be anything: it may have been stopped meanwhile, or somebody else wrote it."""
_TOOK_S_MAX: Final = REST_S_MAX / (1 / SURVEY_SHARE - 1)


class Rest:
    """Tells whether a survey may begin. One thread, the keeper's.

    Args:
        clock: Returns seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.took_s = 0.0
        """What the last survey that was measured has taken, as far as it counts."""
        self._clock = clock
        self._until_s = -math.inf

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until_s

    def begin(self, survey_s: float) -> None:
        """Rest after a survey, of whatever process, that has taken so long, and has ended by now."""
        self._until_s = max(self._until_s, self._clock() + min(survey_s, _TOOK_S_MAX) * (1 / SURVEY_SHARE - 1))

    def end(self) -> None:
        """Rest no longer: what there was to rest after is gone."""
        self._until_s = -math.inf

    @contextmanager
    def after(self) -> Iterator[None]:
        """Measure a survey, and rest after it, however it ends."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.took_s = min(self._clock() - began_s, _TOOK_S_MAX)
            self.begin(self.took_s)
