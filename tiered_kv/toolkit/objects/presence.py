"""Finds out which blocks exist in the bucket, with few requests.

A block is useful only if all blocks before it in its prefix exist. A k-ary search finds the last useful block. Each
round sends parallel requests, spread over the blocks between the last existing one and the first missing one that are
known. A prefix of 1,000 blocks takes three rounds, for any content of the bucket. A hole (a missing block before
existing ones) may stay unseen; its load is a miss. If answers show that the blocks are not in the order of a prefix,
the search asks for each block.

The tier's workers ask; the sweeper's threads note deleted blocks. Answers are kept for `presence_ttl`, for all
requests. An older answer never replaces a newer one.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tiered_kv.metrics.counters import Counters
from tiered_kv.toolkit.objects.store import ObjectStore
from tiered_kv.toolkit.objects.verdict import ABSENCE, UNHEARD, Verdict
from tiered_kv.toolkit.record import UNREADABLE_S

ANSWERS_MAX = 65_536  # answers that are kept; the oldest are removed first
ASKED_AT_ONCE = 16  # parallel requests for one prefix
KEPT_S = {Verdict.UNANSWERED: 30.0, Verdict.UNREADABLE: UNREADABLE_S}  # how long such a block is a miss


class Presence:
    """Looks blocks up, and keeps the answers. Any thread may call."""

    def __init__(
        self, store: ObjectStore, counters: Counters, answer_ttl_s: float, on_silence: Callable[[], None] = lambda: None
    ) -> None:
        self._on_silence = on_silence  # called if the bucket has answered no request
        self._store = store
        self._counters = counters
        self._answer_ttl_s = answer_ttl_s
        self._lock = threading.Lock()  # guards the answers; never held across I/O
        self._answers: OrderedDict[str, tuple[float, Verdict]] = OrderedDict()
        """Answers with their times, by name of the block. The latest answer is the last."""
        self._answered_s = -math.inf
        """When the bucket last answered a lookup, in seconds of `time.monotonic()`."""

    def note(self, name: str, verdict: Verdict, asked_s: float) -> None:
        """Keep the verdict on a block at `asked_s` (of `time.monotonic()`), unless there is a newer one.

        The verdict is DONE, one of `ABSENCE`, or one of `KEPT_S`.
        """
        with self._lock:
            if self._answers.get(name, (asked_s, verdict))[0] > asked_s:
                return  # such as a store of this process since then
            self._answers[name] = (asked_s, verdict)
            self._answers.move_to_end(name)
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)

    def known(self, name: str) -> Verdict | None:
        with self._lock:
            return self._known(name, time.monotonic())

    def forget(self) -> None:
        with self._lock:
            self._answers.clear()

    def ask(self, prefixes: Sequence[Sequence[str]], deadline: float) -> set[str]:
        """Return the blocks that exist, without blocks that have no answer by the deadline.

        Each prefix has the names of blocks in the order of one prompt; all prefixes are searched in parallel.
        """
        with self._lock:
            now_s = time.monotonic()
            searches = [_Search(names, [self._known(name, now_s) for name in names]) for names in prefixes]
        while wanted := [(search, at) for search in searches for at in search.next_positions()]:
            verdicts = self._ask_each([search.names[at] for search, at in wanted], deadline)
            for (search, at), verdict in zip(wanted, verdicts, strict=True):
                search.answers[at] = verdict
        return {name for search in searches for name in search.found()}

    def _known(self, name: str, now_s: float) -> Verdict | None:
        asked_s, verdict = self._answers.get(name, (-math.inf, Verdict.ABSENT))
        return verdict if now_s - asked_s < KEPT_S.get(verdict, self._answer_ttl_s) else None

    def _ask_each(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        asked_s = time.monotonic()
        verdicts = self._store.head_all(names, deadline)
        failed = []
        for name, verdict in zip(names, verdicts, strict=True):
            if verdict is Verdict.DONE or verdict in ABSENCE:
                self.note(name, verdict, asked_s)
            else:
                failed.append((name, verdict))
        if len(failed) < len(names):
            self._answered_s = time.monotonic()
        if self._answered_s < asked_s:
            self._counters.add("unanswered_lookups_total", count=len(failed))
            if UNHEARD.issuperset(verdicts) and self._store.heard_s < asked_s:
                self._on_silence()
            return verdicts
        self._counters.add("unanswered_blocks_total", count=len(failed))
        for name, verdict in failed:
            if verdict is not Verdict.UNASKED:
                self.note(name, Verdict.UNANSWERED, asked_s)
        return verdicts


class _Search:
    """The search for the end of one prefix."""

    def __init__(self, names: Sequence[str], answers: list[Verdict | None]) -> None:
        self.names = names
        self.answers = answers
        self._has_begun = False

    def next_positions(self) -> Sequence[int]:
        """Return the blocks to ask for next, none once the end is found. The first round asks for the first block."""
        unknown = [at for at, answer in enumerate(self.answers) if answer is None]
        is_first, self._has_begun = not self._has_begun, True
        # An existing block after an absent one shows another order; after an unanswered one it does not.
        absent_at = next((at for at, answer in enumerate(self.answers) if answer in ABSENCE), len(self.answers))
        if (is_first and len(unknown) <= ASKED_AT_ONCE) or Verdict.DONE in self.answers[absent_at:]:
            return unknown
        existing_at, missing_at = self._bounds()
        between = [at for at in unknown if existing_at < at < missing_at]
        first = [0] if unknown[:1] == [0] and existing_at > 0 else []
        if len(between) <= ASKED_AT_ONCE:
            return first + between
        last = len(between) - 1
        return first + [between[part * last // (ASKED_AT_ONCE - 1)] for part in range(ASKED_AT_ONCE)]

    def found(self) -> list[str]:
        """Return the blocks that exist. A block without an answer counts as existing, if a later block exists."""
        existing_at, _ = self._bounds()
        return [
            name
            for at, (name, answer) in enumerate(zip(self.names, self.answers, strict=True))
            if answer is Verdict.DONE or (answer is None and at < existing_at)
        ]

    def _bounds(self) -> tuple[int, int]:
        """Return the positions of the last existing block (or -1) before the first missing one, and of that one."""
        answers = self.answers
        missing = (at for at, answer in enumerate(answers) if answer is not None and answer is not Verdict.DONE)
        missing_at = next(missing, len(answers))
        return next((at for at in range(missing_at - 1, -1, -1) if answers[at] is Verdict.DONE), -1), missing_at
