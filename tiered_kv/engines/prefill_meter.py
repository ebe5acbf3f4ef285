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
"""The least tokens of a request in a step that computes a prompt. Generation has fewer tokens, even with
speculation."""
PREFILL_SHARE_MIN = 0.5
"""Least tokens of prompts in a step that counts, as a share of the largest step: smaller steps spend much time on other
work. The time of a step without prompts cannot be subtracted: the launches of kernels overlap with the computing of
prompts."""
LARGEST_FORGET = 0.98
"""Factor of the largest step at each step with prompts: an engine may change to smaller steps."""
STEPS_MAX = 15
"""The number of steps of a median, so that one slow step, such as the first of a shape, does not count."""
SPREAD_MIN = 128
"""Least difference between two steps in the tokens before them: only such pairs of steps give the growth."""
_RUNNING_MAX = 64
_FORGET = 0.95  # weight of the average before, at each step


class TokenCost(NamedTuple):
    """A token takes `token_s` seconds, and `growth_s` more for each token before it, with which attention grows."""

    token_s: float
    growth_s: float


class PrefillMeter:
    """Times steps from their schedule to their output, in the same order. Owned by the scheduler's thread.

    With several steps in flight, a step begins at the end of the step before it. The engine needs the time of a step
    without prompts in any case, so this time is no part of a prompt's cost. Otherwise the few new tokens of a long chat
    would seem expensive, and with them the tokens before them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: deque[tuple[int | None, float, float]] = deque(maxlen=_RUNNING_MAX)
        """Steps in flight: tokens of prompts (None if it only generates), average tokens before them, and the start."""
        self._largest = 0.0  # tokens of prompts in the largest step, which decays
        self._base: deque[float] = deque(maxlen=STEPS_MAX)
        """Seconds of the last steps that only generated."""
        self._ended_s = 0.0
        self.step_s = 0.0
        """Average seconds of a step of any kind, mostly of the last twenty steps."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_MAX)
        """For each step, the average number of tokens before one of its tokens, and the seconds of a token."""

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
