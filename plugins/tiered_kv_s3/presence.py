"""Which blocks are in the bucket, asked as rarely as an answer may be old.

An answer is kept for `presence_ttl`, whoever asked. Blocks that no answer is kept for are asked for together: one
listing of the whole epoch where that takes fewer requests than it is worth, else one HEAD a block over several
connections. A listing answers for every block there is, and for every one there is not.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from tiered_kv.errors import TierUnavailableError
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.listing import PAGE_OBJECTS, Listing
from tiered_kv_s3.suspects import Suspects, Way
from tiered_kv_s3.verdict import ABSENCE, Verdict

ANSWERS_MAX = 65_536
"""Answers about single blocks that are kept; the oldest go first."""
LISTED_PAGES_MAX = 8
"""Pages that a lookup will list at most."""
HEADS_PER_PAGE = 12
"""How many HEAD requests one page of a listing is worth: S3 charges for it as for twelve, and takes about as long."""
LISTING_RETRY_S = 30.0
"""How long after a listing that failed, or had too many pages, the next one is tried."""


class Presence:
    """Answers to "is it there?". Any thread may call.

    Args:
        bucket: Answers for single blocks.
        listing: Answers for all.
        counters: Where failures are counted.
        suspects: Blocks that are misses because the bucket does not answer for them.
        answer_ttl_s: How long an answer is kept.
        object_ttl_s: How old a block may be; None for any age.
    """

    def __init__(
        self,
        bucket: Bucket,
        listing: Listing,
        counters: Counters,
        suspects: Suspects,
        *,
        answer_ttl_s: float,
        object_ttl_s: float | None,
    ) -> None:
        self._bucket = bucket
        self._listing = listing
        self._counters = counters
        self._suspects = suspects
        self._answer_ttl_s = answer_ttl_s
        self._object_ttl_s = object_ttl_s
        self._lock = threading.Lock()  # guards the rest; never held across I/O
        self._answers: OrderedDict[str, tuple[float, bool]] = OrderedDict()  # name to (asked when, answer), by age
        self._listed: frozenset[str] = frozenset()
        self._listed_prefix = ""
        self._listed_s = -1e9
        self._pages = 1  # what the next listing is thought to take
        self._no_listing_before_s = 0.0
        self._listing_turn = threading.Lock()  # a listing that hangs holds up one thread, and no more

    def note(self, name: str, is_there: bool, asked_s: float) -> None:
        """Keep what is known of a block since `asked_s`, in seconds of `time.monotonic()`."""
        with self._lock:
            self._keep(name, is_there, asked_s)

    def known(self, name: str, prefix: str) -> bool | None:
        """Return the answer for a block of the epoch `prefix` if one is kept."""
        with self._lock:
            return self._known(name, prefix, time.monotonic() - self._answer_ttl_s)

    def forget(self) -> None:
        """Drop every answer."""
        with self._lock:
            self._answers.clear()
            self._listed = frozenset()
            self._listed_prefix = ""

    def ask(self, names: Sequence[str], prefix: str, deadline: float) -> list[bool]:
        """Return whether each block is there; False for one whose answer could not be had by the deadline.

        Args:
            names: Blocks of the epoch `prefix`.
            prefix: What the names of the epoch's blocks begin with.
            deadline: When the answers must be there, in seconds of `time.monotonic()`.
        """
        began_s = time.monotonic()
        answers = self._known_of(names, prefix, began_s - self._answer_ttl_s)
        answers |= {name: False for name in answers if name in self._suspects}
        unknown = [name for name in names if answers[name] is None]
        if unknown and self._is_listing_cheaper(len(unknown)) and self._list(prefix, deadline):
            answers |= self._known_of(unknown, prefix, began_s - self._answer_ttl_s)
            unknown = [name for name in names if answers[name] is None]
        if unknown:
            self._ask_each(list(dict.fromkeys(unknown)), answers, deadline)
        return [answers[name] is True for name in names]

    def _known_of(self, names: Sequence[str], prefix: str, since_s: float) -> dict[str, bool | None]:
        with self._lock:
            return {name: self._known(name, prefix, since_s) for name in names}

    def _known(self, name: str, prefix: str, since_s: float) -> bool | None:
        asked_s, answer = self._answers.get(name, (-1e9, False))
        if asked_s >= since_s and asked_s >= self._listed_s:
            return answer
        if self._listed_s >= since_s and self._listed_prefix == prefix:
            return name in self._listed
        return answer if asked_s >= since_s else None

    def _keep(self, name: str, is_there: bool, asked_s: float) -> None:
        self._answers[name] = (asked_s, is_there)
        self._answers.move_to_end(name)
        if len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)

    def _is_listing_cheaper(self, unknown: int) -> bool:
        return unknown >= self._pages * HEADS_PER_PAGE and time.monotonic() >= self._no_listing_before_s

    def _list(self, prefix: str, deadline: float) -> bool:
        """List the epoch; return whether that was possible."""
        if not self._listing_turn.acquire(blocking=False):
            return False
        try:
            return self._list_all(prefix, deadline)
        finally:
            self._listing_turn.release()

    def _list_all(self, prefix: str, deadline: float) -> bool:
        asked_s = time.monotonic()
        listed: set[str] = set()
        pages = 0
        try:
            for page in self._listing.pages(prefix, deadline):
                pages += 1
                listed.update(entry.name for entry in page if not self._is_expired(entry.age_s))
                if pages >= LISTED_PAGES_MAX and len(page) == PAGE_OBJECTS:
                    raise _TooManyPagesError
        except (TierUnavailableError, _TooManyPagesError):
            self._no_listing_before_s = time.monotonic() + LISTING_RETRY_S
            return False
        with self._lock:
            self._listed = frozenset(listed)
            self._listed_prefix = prefix
            self._listed_s = asked_s
            self._pages = max(1, pages)
        return True

    def _is_expired(self, age_s: float) -> bool:
        return self._object_ttl_s is not None and age_s > self._object_ttl_s

    def _ask_each(self, names: list[str], answers: dict[str, bool | None], deadline: float) -> None:
        asked_s = time.monotonic()
        verdicts = self._bucket.are_there(names, deadline)
        failed = []
        with self._lock:
            for name, verdict in zip(names, verdicts, strict=True):
                if verdict is Verdict.DONE or verdict in ABSENCE:
                    answers[name] = verdict is Verdict.DONE
                    self._keep(name, verdict is Verdict.DONE, asked_s)
                else:
                    failed.append(name)
        if len(failed) < len(names):
            self._suspects.note_answer(Way.READ)
        alone = sum(self._suspects.note_failed_read(name, asked_s) for name in failed)
        self._counters.add("unanswered_blocks", alone)
        self._counters.add("failed_lookups", len(failed) - alone)


class _TooManyPagesError(Exception):
    """A listing takes longer than asking for each block would."""
