"""The time that a token of a prompt takes an engine, measured from its steps.

vLLM's plugin calls it, on the scheduler's thread, once a step. It keeps a bounded number of steps; one slow step does
not change its answer.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import NamedTuple

PROMPT_TOKENS_MIN = 32
"""Tokens of a request in a step that must be of its prompt: it generates fewer, even with speculation."""
PREFILL_SHARE_MIN = 0.5
"""Tokens of prompts in a step that counts, as a share of the largest step: smaller steps spend much time on other work.
The time of a step without prompts cannot be subtracted from the prompts': the launches of kernels overlap with the
computing."""
LARGEST_FORGET = 0.98
"""Factor for the largest step at each step with prompts: an engine may go over to smaller ones."""
STEPS_MAX = 15
"""The number of steps of a median, so that one slow step, such as the first of a shape, does not count."""
SPREAD_MIN = 128
"""Least difference in the tokens before two steps, from which the growth is computed."""
_RUNNING_MAX = 64
_FORGET = 0.95


class TokenCost(NamedTuple):
    """A token takes `token_s` seconds, and `growth_s` more for each token before it, with which attention grows."""

    token_s: float
    growth_s: float


class PrefillMeter:
    """Times steps from their schedule to their output, in the same order. Owned by the scheduler's thread.

    With several steps in flight, a step begins at the end of the step before it. The engine spends the time of a step
    without prompts in any case, so it is no part of a prompt's cost. Otherwise the few tokens of a long chat's next
    turn would seem dear, and with them the tokens before them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: deque[tuple[int | None, float, float]] = deque(maxlen=_RUNNING_MAX)
        self._largest = 0.0
        self._base: deque[float] = deque(maxlen=STEPS_MAX)
        """Seconds of the last steps that only generated."""
        self._ended_s = 0.0
        self.step_s = 0.0
        """Seconds of a step of any kind, on average: about the last twenty matter."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_MAX)
        """For each step, how many tokens are before one of its tokens, on average, and the seconds of a token."""

    def begin(self, parts: Iterable[tuple[int, int]]) -> None:
        """Note a scheduled step: for each request, its tokens in the step, and how many are before them."""
        parts = list(parts)
        prompts = [(tokens, before) for tokens, before in parts if tokens >= PROMPT_TOKENS_MIN]
        total = sum(tokens for tokens, _ in prompts)
        pairs = sum(tokens * (before + tokens / 2) for tokens, before in prompts)
        generates = any(tokens for tokens, _ in parts) and not prompts
        self._running.append((None if generates else total, pairs / max(total, 1), self._clock()))

    def end(self) -> TokenCost | None:
        """Note the output of the oldest step, and return the new cost of a token if that step counts."""
        if not self._running:
            return None
        tokens, before, began_s = self._running.popleft()
        last_s, self._ended_s = self._ended_s, self._clock()
        duration_s = self._ended_s - max(began_s, last_s)
        self.step_s = duration_s if not self.step_s else _FORGET * self.step_s + (1 - _FORGET) * duration_s
        if tokens is None:
            self._base.append(duration_s)
            return None
        self._largest = max(LARGEST_FORGET * self._largest, tokens)
        if tokens < max(1.0, PREFILL_SHARE_MIN * self._largest):
            return None
        base_s = statistics.median(self._base) if self._base else 0.0
        self._steps.append((before, max(duration_s - base_s, 1e-9) / tokens))
        # The median of the slopes between all pairs, after Theil and Sen.
        slopes = [
            (cost - other_cost) / (at - other_at)
            for (at, cost), (other_at, other_cost) in combinations(self._steps, 2)
            if abs(at - other_at) >= SPREAD_MIN
        ]
        growth_s = max(0.0, statistics.median(slopes)) if slopes else 0.0
        token_s = statistics.median(cost - growth_s * at for at, cost in self._steps)
        return TokenCost(max(0.0, token_s), growth_s)
