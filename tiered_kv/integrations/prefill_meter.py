"""How many tokens of prompts an engine computes in a second, from its steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable

PROMPT_TOKENS_MIN = 32
"""Tokens of a request in a step that are surely of its prompt: it generates fewer in one, speculated ones included."""
PREFILL_TOKENS_MIN = 256
"""Tokens of prompts with which a step counts: in smaller ones other things than prompts take most of the time."""
STEPS_MAX = 15
"""Steps of which the median counts, so that no single one does, such as the first of a shape."""
_RUNNING_MAX = 64


class PrefillMeter:
    """Times steps from their schedule to their output, which come in the same order. Owned by the scheduler's thread.

    With several steps in flight a step begins when the one before it has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: deque[tuple[int, float]] = deque(maxlen=_RUNNING_MAX)
        self._ended_s = 0.0
        self._rates: deque[float] = deque(maxlen=STEPS_MAX)

    def begin(self, tokens: Iterable[int]) -> None:
        """Note that a step with so many tokens of each request was scheduled."""
        self._running.append((sum(each for each in tokens if each >= PROMPT_TOKENS_MIN), self._clock()))

    def end(self) -> float | None:
        """Note the output of the oldest step; return the tokens in a second if that step says something of them."""
        if not self._running:
            return None
        tokens, began_s = self._running.popleft()
        before_s, self._ended_s = self._ended_s, self._clock()
        if tokens < PREFILL_TOKENS_MIN:
            return None
        self._rates.append(tokens / max(self._ended_s - max(began_s, before_s), 1e-9))
        return statistics.median(self._rates)
