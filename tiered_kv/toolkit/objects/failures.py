"""Counts failed requests, and logs them in sentences, at a bounded rate. The stores of object tiers call it.

Any thread may call. No message repeats a secret: the sentence's author removes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiered_kv.metrics.counters import Counters
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.toolkit.failure_texts import OF_LOOKUPS, FailureTexts

Sentence = Callable[[str, str, str], str]
"""From a reason, the words of the server or the system, and an operation, to the fault and the remedy."""


class RequestFailures:
    """The failed requests of one tier, counted in `failed_requests_total`."""

    def __init__(self, tier: str, counters: Counters, sentence: Sentence, log: logging.Logger) -> None:
        self.counters = counters  # the tier's
        self.texts = FailureTexts()
        self._tier = tier
        self.sentence = sentence
        self._log = log
        self._limit = LogLimit()
        """Limits the lines of the log, by operation, reason and level."""

    def note(self, operation: str, reason: str, words: str, level: int = logging.WARNING) -> str:
        """Count a failure, and log it, at a bounded rate for each operation and reason; return its sentence."""
        self.counters.add("failed_requests_total", operation, str(reason))  # a label is no member of an enum
        said = self.sentence(reason, words, operation)
        self.texts.note(OF_LOOKUPS if operation == "head" else str(reason), said)
        if self._limit.take((operation, reason, level)) is not None:
            about = "tier '%s': a request to %s failed: %s; %s, in failed_requests_total{%s}"
            self._log.log(level, about, self._tier, operation, said, self._limit.about, str(reason))
        return said
