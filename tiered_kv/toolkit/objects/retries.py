"""Repeats a request for an object until it succeeds or fails for good, or its attempts or its time are over.

The stores of object tiers call it, on any thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

from tiered_kv.toolkit.objects.failures import RequestFailures
from tiered_kv.toolkit.objects.verdict import FAILURES, RETRYABLE, Verdict

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0


class Retries:
    """The attempts of one store's requests, and the words of their failures."""

    def __init__(self, attempts_max: int, failures: RequestFailures) -> None:
        self._attempts_max = attempts_max
        self._failures = failures
        self.words: dict[Verdict, str] = {}  # the server's last text, by verdict; any thread
        self.closing = threading.Event()

    def attempts(self, until_s: float) -> Iterator[int]:
        """Yield the number of each attempt, after a pause for all but the first, while there is time for another."""
        yield 0
        for number in range(1, self._attempts_max):
            pause_s = random.uniform(0, min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (number - 1)))
            if time.monotonic() + pause_s >= until_s or self.closing.wait(pause_s):
                return
            yield number

    def run(self, method: str, attempt: Callable[[], Verdict], deadline: float) -> Verdict:
        """Make a request by `attempt`, and repeat it while that may help; count a failure."""
        verdict, counters = Verdict.TIMEOUT, self._failures.counters
        for number in self.attempts(deadline):
            counters.add("retried_requests_total", count=min(number, 1))
            verdict = attempt()
            counters.add("slow_down_answers_total", count=verdict is Verdict.SLOW_DOWN)
            if verdict not in RETRYABLE:
                break
        verdict = Verdict.MOVED if verdict is Verdict.REDIRECTED else verdict  # the server names regions without end
        if verdict in FAILURES:
            self._failures.note(method, verdict, self.words.get(verdict, ""))
        return verdict
