"""Which blocks are in the bucket, located with few requests.

A block is useful only while all blocks before it in its prefix exist, so a prefix exists up to some block. A k-ary
search finds that block: some parallel requests, spread over the prefix, and then again between the last block that
exists and the first that does not. A prefix of 1,000 blocks takes three such rounds, whatever else is in the bucket. A
hole, a block that is gone although later ones are there, is found by its load, as a miss. Where answers show that
blocks were not asked for in the order of a prefix, each is asked for.

Answers are kept for `presence_ttl`, whoever asked. A tier that sweeps also lists a namespace in the background whose
blocks fit into one page; the listing answers for all blocks as long as one answer is kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

from tiered_kv.counters import Counters
from tiered_kv.errors import TierError
from tiered_kv.toolkit.background import BackgroundTask
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import Control
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import ABSENCE, Verdict

ANSWERS_MAX = 65_536
"""Answers that are kept; the oldest go first."""
ASKED_AT_ONCE = 16
"""Blocks of one prefix that are asked for side by side."""
MISS_S = 30.0
"""How long a block is a miss that the bucket did not answer for while it answered for others."""
LISTING_PAUSE_S = 600.0
"""How long after a listing that failed, or had more than a page, the next is tried."""


class Presence:
    """Answers to "is it there?". Any thread may call."""

    def __init__(
        self, bucket: Bucket, control: Control, counters: Counters, naming: Naming, settings: S3Settings
    ) -> None:
        self._bucket = bucket
        self._control = control
        self._counters = counters
        self._naming = naming
        self._answer_ttl_s = settings.presence_ttl
        self._object_ttl_s = settings.ttl or math.inf
        self._listing = BackgroundTask(self._list, "tiered-kv-s3-listing")
        self._lock = threading.Lock()  # guards the rest; never held across I/O
        self._answers: OrderedDict[str, tuple[float, Verdict]] = OrderedDict()  # name to (asked when, answer), by age
        self._answered_s = -math.inf  # when the bucket answered a lookup last
        self._listed: Collection[str] = ()
        self._listed_s = -math.inf
        # boto3 reads a listing without a limit, so only a tier that sweeps, and lists anyway, lists here too.
        self._list_at_s = -math.inf if self._answer_ttl_s and (settings.ttl or settings.capacity) else math.inf

    def note(self, name: str, verdict: Verdict, asked_s: float) -> None:
        """Keep what is known of a block since `asked_s`, in seconds of `time.monotonic()`, if nothing newer is.

        The verdict is DONE, one of `ABSENCE`, or UNANSWERED, which makes the block a miss for a while.
        """
        with self._lock:
            if self._answers.get(name, (asked_s, verdict))[0] > asked_s:
                return  # what came meanwhile, such as a store of this process, is newer
            self._answers[name] = (asked_s, verdict)
            self._answers.move_to_end(name)
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)

    def known(self, name: str) -> Verdict | None:
        """Return the answer for a block if one is kept."""
        with self._lock:
            return self._known(name, time.monotonic())

    def forget(self) -> None:
        """Remove every answer."""
        with self._lock:
            self._answers.clear()
            self._listed_s = -math.inf

    def ask(self, prefixes: Sequence[Sequence[str]], deadline: float) -> set[str]:
        """Return which blocks are there, without those whose answer could not be had by the deadline.

        Each prefix has the names of blocks in the order of one prompt; all are searched side by side.
        """
        with self._lock:
            now_s = time.monotonic()
            searches = [_Search(names, [self._known(name, now_s) for name in names]) for names in prefixes]
            is_listing_due = now_s >= self._list_at_s
            if is_listing_due:
                self._list_at_s = now_s + LISTING_PAUSE_S
        if is_listing_due:
            self._listing.ask()
        while wanted := [(search, at) for search in searches for at in search.next_positions()]:
            verdicts = self._ask_each([search.names[at] for search, at in wanted], deadline)
            for (search, at), verdict in zip(wanted, verdicts, strict=True):
                search.answers[at] = verdict
        return {name for search in searches for name in search.found()}

    def join(self, timeout_s: float) -> None:
        """Wait for the end of a listing, if there is one under way."""
        self._listing.join(timeout_s)

    def _known(self, name: str, now_s: float) -> Verdict | None:
        asked_s, verdict = self._answers.get(name, (-math.inf, Verdict.ABSENT))
        if verdict is Verdict.UNANSWERED:
            return verdict if now_s - asked_s < MISS_S else None
        if self._listed_s > asked_s:
            asked_s, verdict = self._listed_s, Verdict.DONE if name in self._listed else Verdict.ABSENT
        return verdict if now_s - asked_s < self._answer_ttl_s else None

    def _list(self) -> None:
        """List the namespace's blocks, and keep the listing if they are few."""
        asked_s = time.monotonic()
        try:
            pages = self._control.listed(self._naming.blocks)
            page = next(pages)
            if next(pages, None) is not None:
                return
        except TierError:  # the bucket may allow no listing; single requests answer as well
            return
        with self._lock:
            self._listed = frozenset(entry.name for entry in page if entry.age_s <= self._object_ttl_s)
            self._listed_s = asked_s
            self._list_at_s = asked_s + self._answer_ttl_s / 2

    def _ask_each(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        asked_s = time.monotonic()
        verdicts = self._bucket.are_there(names, deadline)
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
            return verdicts
        self._counters.add("unanswered_blocks_total", count=len(failed))
        for name, verdict in failed:
            if verdict is not Verdict.UNASKED:  # which says nothing of the block
                self.note(name, Verdict.UNANSWERED, asked_s)
        return verdicts


class _Search:
    """The search for the end of one prefix."""

    def __init__(self, names: Sequence[str], answers: list[Verdict | None]) -> None:
        self.names = names
        self.answers = answers
        self._has_begun = False

    def next_positions(self) -> Sequence[int]:
        """Return which blocks to ask for next, none once the end is found; the first block always."""
        unknown = [at for at, answer in enumerate(self.answers) if answer is None]
        is_first, self._has_begun = not self._has_begun, True
        # What the bucket does not answer for is no sign of another order; what it lacks before what it has is one.
        absent_at = next((at for at, answer in enumerate(self.answers) if answer in ABSENCE), len(self.answers))
        if (is_first and len(unknown) <= ASKED_AT_ONCE) or Verdict.DONE in self.answers[absent_at:]:
            return unknown
        there_at, missing_at = self._bounds()
        between = [at for at in unknown if there_at < at < missing_at]
        first = [0] if unknown[:1] == [0] and there_at > 0 else []
        if len(between) <= ASKED_AT_ONCE:
            return first + between
        last = len(between) - 1
        return first + [between[part * last // (ASKED_AT_ONCE - 1)] for part in range(ASKED_AT_ONCE)]

    def found(self) -> list[str]:
        """Return what is there; what has no answer and lies before a block that is there is taken to be there."""
        there_at, _ = self._bounds()
        answers = enumerate(self.answers)
        return [
            self.names[at] for at, answer in answers if answer is Verdict.DONE or (answer is None and at < there_at)
        ]

    def _bounds(self) -> tuple[int, int]:
        """Return the first block that is missing, and before that the last that is there, or -1."""
        answers = self.answers
        missing = (at for at, answer in enumerate(answers) if answer is not None and answer is not Verdict.DONE)
        missing_at = next(missing, len(answers))
        return next((at for at in range(missing_at - 1, -1, -1) if answers[at] is Verdict.DONE), -1), missing_at
