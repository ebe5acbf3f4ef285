"""Which blocks are in the bucket, located with few requests.

A block is of use only while all before it in its prefix are there, so a prefix is there up to some block. That block is
found by a k-ary search: some requests side by side, spread over the prefix, and then again between the last block that
is there and the first that is not. A prefix of 1,000 blocks takes three such rounds, whatever else is in the bucket. A
hole, a block that is gone although later ones are there, is found by its load, as a miss. Where answers show that
blocks were not asked for in the order of a prefix, each is asked for.

Answers are kept for `presence_ttl`, whoever asked.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Container, Sequence

from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.suspects import Suspects, Way
from tiered_kv_s3.verdict import ABSENCE, Verdict

ANSWERS_MAX = 65_536
"""Answers that are kept; the oldest go first."""
ASKED_AT_ONCE = 16
"""Blocks of one prefix that are asked for side by side."""


class Presence:
    """Answers to "is it there?". Any thread may call.

    Args:
        bucket: Answers for single blocks.
        counters: Where failures are counted.
        suspects: Blocks that are misses because the bucket does not answer for them.
        answer_ttl_s: How long an answer is kept.
    """

    def __init__(self, bucket: Bucket, counters: Counters, suspects: Suspects, *, answer_ttl_s: float) -> None:
        self._bucket = bucket
        self._counters = counters
        self._suspects = suspects
        self._answer_ttl_s = answer_ttl_s
        self._lock = threading.Lock()  # guards the rest; never held across I/O
        self._answers: OrderedDict[str, tuple[float, bool]] = OrderedDict()  # name to (asked when, answer), by age

    def note(self, name: str, is_there: bool, asked_s: float) -> None:
        """Keep what is known of a block since `asked_s`, in seconds of `time.monotonic()`, if nothing newer is."""
        with self._lock:
            if self._answers.get(name, (asked_s, False))[0] > asked_s:
                return  # what came meanwhile, such as a store of this process, is newer
            self._answers[name] = (asked_s, is_there)
            self._answers.move_to_end(name)
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)

    def known(self, name: str) -> bool | None:
        """Return the answer for a block if one is kept."""
        with self._lock:
            asked_s, answer = self._answers.get(name, (0.0, None))
            return answer if time.monotonic() - asked_s < self._answer_ttl_s else None

    def forget(self) -> None:
        """Drop every answer."""
        with self._lock:
            self._answers.clear()

    def ask(self, prefixes: Sequence[Sequence[str]], deadline: float) -> list[list[bool]]:
        """Return whether each block is there; False for one whose answer could not be had by the deadline.

        Args:
            prefixes: Names of blocks, each sequence in the order of one prompt; all are searched side by side.
            deadline: When the answers must be there, in seconds of `time.monotonic()`.
        """
        searches = [self._search(names) for names in prefixes]
        while wanted := [(search, at) for search in searches for at in search.next_positions()]:
            names = [search.names[at] for search, at in wanted]
            for (search, at), verdict in zip(wanted, self._ask_each(names, deadline), strict=True):
                search.answers[at] = verdict is Verdict.DONE
                if verdict is not Verdict.DONE and verdict not in ABSENCE:
                    search.unanswered.add(at)
        return [search.result() for search in searches]

    def _search(self, names: Sequence[str]) -> _Search:
        suspects = {at for at, name in enumerate(names) if name in self._suspects}
        answers = [False if at in suspects else self.known(name) for at, name in enumerate(names)]
        return _Search(names, answers, suspects)

    def _ask_each(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        asked_s = time.monotonic()
        verdicts = self._bucket.are_there(names, deadline)
        failed = []
        for name, verdict in zip(names, verdicts, strict=True):
            if verdict is Verdict.DONE or verdict in ABSENCE:
                self.note(name, verdict is Verdict.DONE, asked_s)
            else:
                failed.append((name, verdict))
        if len(failed) < len(names):
            self._suspects.note_answer(Way.LOOKUP)
        for name, verdict in failed:
            if verdict is not Verdict.UNASKED:  # which says nothing of the block
                self._suspects.note_failed_read(Way.LOOKUP, name, asked_s)
        is_alone = self._suspects.has_answered(Way.LOOKUP, asked_s)
        self._counters.add("unanswered_blocks_total" if is_alone else "unanswered_lookups_total", count=len(failed))
        return verdicts


class _Search:
    """The search for the end of one prefix.

    Args:
        names: Blocks in the order of their prefix.
        answers: What is known of each, or None.
        unanswered: Positions whose answer is False because the bucket does not answer: no sign of another order.
    """

    def __init__(self, names: Sequence[str], answers: list[bool | None], unanswered: set[int]) -> None:
        self.names = names
        self.answers = answers
        self.unanswered = unanswered
        self._has_begun = False

    def next_positions(self) -> Sequence[int]:
        """Return which blocks to ask for next, none once the end is found; the first block always."""
        unknown = [at for at, answer in enumerate(self.answers) if answer is None]
        is_first, self._has_begun = not self._has_begun, True
        missing_at = self._first_missing()
        if (is_first and len(unknown) <= ASKED_AT_ONCE) or any(self.answers[self._first_missing(self.unanswered) :]):
            return unknown  # few; or it is no prefix, in whose order they were asked
        there_at = self._last_there(missing_at)
        between = [at for at in unknown if there_at < at < missing_at]
        first = [0] if unknown[:1] == [0] and there_at > 0 else []
        if len(between) <= ASKED_AT_ONCE:
            return first + between
        last = len(between) - 1
        return first + [between[part * last // (ASKED_AT_ONCE - 1)] for part in range(ASKED_AT_ONCE)]

    def result(self) -> list[bool]:
        """Return the answers; what has none and lies before a block that is there is taken to be there."""
        there_at = self._last_there(self._first_missing())
        return [at < there_at if answer is None else answer for at, answer in enumerate(self.answers)]

    def _first_missing(self, besides: Container[int] = ()) -> int:
        missing = (at for at, answer in enumerate(self.answers) if answer is False and at not in besides)
        return next(missing, len(self.answers))

    def _last_there(self, end: int) -> int:
        return next((at for at in range(end - 1, -1, -1) if self.answers[at]), -1)
