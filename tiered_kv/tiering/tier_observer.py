"""What a guarded tier tells others: its counts and measures, its notices, its part of the history, and its events."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, Final

from tiered_kv.base import OffloadingEvent
from tiered_kv.counters import Counters
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.errors import TierError
from tiered_kv.observe.fates import Fate, fate_of
from tiered_kv.observe.histogram import BYTES, SECONDS, SHORT_SECONDS, Histogram
from tiered_kv.observe.history import BlockHistory
from tiered_kv.observe.notices import Notices
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult
from tiered_kv.tiering.events import TierEvents
from tiered_kv.toolkit.status import DAMAGE_REASONS

logger = logging.getLogger(__name__)

_NAMES: Final = (
    "stored_blocks_total",
    "stored_bytes_total",
    "loaded_blocks_total",
    "loaded_bytes_total",
    "refused_promotion_blocks_total",
    "too_slow_blocks_total",
    "expired_jobs_total",
    "late_jobs_total",
    "lookup_timeouts_total",
    "exceptions_total",
    "unknown_results_total",
)
_DIRECTIONS: Final = ("store", "load")
_LABELLED: Final = ("submitted_jobs_total", "skipped_blocks_total", "failed_blocks_total")


class TierObserver:
    """Counts what one guarded tier does, and notes it for the history and the events. Owned by the manager's thread.

    Args:
        name: The tier's name.
        number: Its place in the order of the search.
        block_bytes: Bytes of one block.
        notices: Where its changes of state are noted.
        history: Where it is noted what became of its blocks; None for nowhere.
        events: Its events; None where nobody takes them.
    """

    def __init__(
        self,
        name: str,
        number: int,
        block_bytes: int,
        notices: Notices,
        history: BlockHistory | None,
        events: TierEvents | None,
    ) -> None:
        self.counters = Counters(_NAMES, _LABELLED)
        self.measures = TierMeasures()
        self._name = name
        self._number = number
        self._block_bytes = block_bytes
        self._notices = notices
        self._history = history
        self._events = events
        self._jobs_before_reset: frozenset[JobId] = frozenset()

    def notice(self, what: str) -> None:
        """Note a change of state of the tier."""
        self._notices.add(self._name, what)

    def skipped(self, reason: str, blocks: Sequence[CPUBlock]) -> None:
        """Count, and note, blocks that are not stored to this tier."""
        if blocks:
            self.counters.add("skipped_blocks_total", reason, count=len(blocks))
            if self._history is not None:
                self._history.note(self._number, fate_of(reason), [block.key for block in blocks])

    def ended(self, job: JobMetadata, result: JobResult, done: int, total: int) -> None:
        """Count and note the result of a job that succeeded for `done` of its `total` blocks."""
        what = "loaded" if job.is_promotion else "stored"
        self.counters.add(f"{what}_blocks_total", count=done)
        self.counters.add(f"{what}_bytes_total", count=done * self._block_bytes)
        if done < total:
            self.failed(job, total - done, result.reason or "failed")
        if job.job_id in self._jobs_before_reset:  # the tier has forgotten what it stored
            result, done = JobResult(job.job_id, False, reason="reset"), 0
        if self._history is not None:
            self._note(self._history, job, result, done)
        if self._events is not None:
            self._events.note(job, result)

    def failed(self, job: JobMetadata, num_blocks: int, reason: str) -> None:
        """Count blocks of a job that were not loaded, or not stored."""
        self.counters.add("failed_blocks_total", direction_of(job), reason, count=num_blocks)
        if reason in DAMAGE_REASONS:
            self._notices.add(self._name, "damaged blocks", num_blocks)

    def expired(self, job: JobMetadata) -> None:
        """Count a job whose deadline has passed, and note the blocks of a store; a load's requests say it of theirs."""
        self.failed(job, len(job.keys), "expired")
        if self._history is not None and not job.is_promotion:
            self._history.note(self._number, fate_of("expired"), job.keys)

    def gave_up(self) -> None:
        """Note that the tier answered a lookup with a miss because it could not know."""
        if self._history is not None:
            self._history.gave_up(self._number)

    def reset(self, jobs: Sequence[JobId]) -> None:
        """Note that the tier has forgotten its blocks, those of stores in flight (`jobs`) included."""
        self._jobs_before_reset = frozenset(jobs)
        if self._history is not None:
            self._history.reset(self._number)
        if self._events is not None:
            try:
                self._events.reset()
            except Exception:
                self.note_exception("take_events")

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's events since the last call."""
        if self._events is None:
            return []
        try:
            return self._events.take()
        except Exception:
            self.note_exception("take_events")
            return []

    def note_exception(self, operation: str) -> None:
        """Count an exception of the tier, in an `except` block; the first is logged.

        The log has its type and place, but not its text: a client library may have put a password into the text.
        """
        self.counters.add("exceptions_total")
        if self.counters["exceptions_total"] == 1:
            # The others are counted only; a broken tier must not flood the log.
            self.notice(f"first exception, in {operation}")
            kind, _, traceback = sys.exc_info()
            nameless = TierError(kind.__name__ if kind else "", tier=self._name, operation=operation)
            about = "tier %r raised in %s; further exceptions are only counted"
            logger.error(about, self._name, operation, exc_info=(TierError, nameless, traceback))

    def _note(self, history: BlockHistory, job: JobMetadata, result: JobResult, done: int) -> None:
        """Note which blocks the tier has now, or does not have any more."""
        keys, is_load = job.keys, job.is_promotion
        if done == len(keys):
            if not is_load:
                history.note(self._number, Fate.STORED, keys)
            return
        ok = frozenset(result.successful_keys or ())
        if done and not is_load:
            history.note(self._number, Fate.STORED, [key for key in keys if key in ok])
        fate = fate_of(result.reason or "failed")
        if not is_load or fate in (Fate.EVICTED, Fate.CORRUPT):  # after others the tier still has the block
            history.note(self._number, fate, [key for key in keys if key not in ok])


class TierMeasures:
    """The histograms of one secondary tier. The manager's thread adds, any thread may read.

    Attributes:
        lookup_seconds: How long the tier took to answer a lookup.
        noted_s: The step whose first late answer is in `lookup_seconds` already, by the time of its beginning.
    """

    __slots__ = ("_job_bytes", "_job_seconds", "lookup_seconds", "noted_s")

    def __init__(self) -> None:
        self.lookup_seconds = Histogram(SHORT_SECONDS)
        self.noted_s = 0.0
        self._job_seconds = {direction: Histogram(SECONDS) for direction in _DIRECTIONS}
        self._job_bytes = {direction: Histogram(BYTES) for direction in _DIRECTIONS}

    def add_job(self, direction: str, seconds: float, size_bytes: int) -> None:
        """Count a job that the tier has reported, whatever became of it."""
        self._job_seconds[direction].add(seconds)
        self._job_bytes[direction].add(size_bytes)

    def snapshot(self) -> dict[str, Any]:  # Any: as `Histogram.snapshot`, some by direction
        """Return all histograms by name."""
        return {
            "job_seconds": {direction: seconds.snapshot() for direction, seconds in self._job_seconds.items()},
            "job_bytes": {direction: sizes.snapshot() for direction, sizes in self._job_bytes.items()},
            "lookup_seconds": self.lookup_seconds.snapshot(),
        }


def direction_of(job: JobMetadata) -> str:
    """Return a job's direction in the counters."""
    return "load" if job.is_promotion else "store"
