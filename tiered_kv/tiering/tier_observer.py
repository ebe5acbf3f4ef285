"""Counters, histograms, notices, history and events of one guarded tier."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.errors import TierError
from tiered_kv.history.fates import Fate, fate_of
from tiered_kv.history.recorder import BlockHistory
from tiered_kv.metrics.instruments import BYTES, SECONDS, SHORT_SECONDS, Counters, Histogram, Notices
from tiered_kv.reasons import DAMAGE_REASONS, UNUSABLE_REASONS
from tiered_kv.tiering.answers import WrongValueError, checked_event, checked_flag, tier_exceptions
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager

logger = logging.getLogger(__name__)

EVENTS_MAX: Final = 1 << 12
"""Events of a tier's jobs that are kept until they are taken; the oldest are dropped."""

_GONE_REASONS: Final = UNUSABLE_REASONS | {"absent", "missing"}
"""Reasons of failed loads after which the tier has no usable copy of the block."""

_NAMES: Final = (
    "stored_blocks_total",
    "stored_bytes_total",
    "loaded_blocks_total",
    "loaded_bytes_total",
    "refused_promotion_blocks_total",
    "expired_jobs_total",
    "late_jobs_total",
    "lookup_timeouts_total",
    "exceptions_total",
    "unknown_results_total",
)
_DIRECTIONS: Final = ("store", "load")
_LABELLED: Final = (
    "submitted_jobs_total",
    "skipped_blocks_total",
    "failed_blocks_total",
    "too_slow_blocks_total",
    "learning_jobs_total",
)


class TierObserver:
    """Counts what one guarded tier does, and records it in the history and as events. Owned by the manager's thread.

    `event_source` is the tier itself if its events are collected, else None. `GuardedTier` explains the others.
    """

    def __init__(
        self,
        name: str,
        number: int,
        block_bytes: int,
        notices: Notices,
        history: BlockHistory | None,
        event_source: SecondaryTierManager | None,
    ) -> None:
        self.counters = Counters(_NAMES, _LABELLED)
        self.measures = TierMeasures()
        self._name = name
        self._number = number
        self._block_bytes = block_bytes
        self._notices = notices
        self._history = history
        self._event_source = event_source
        self._tier_reports_stored = event_source is not None and self._reports_stored(event_source)
        self._job_events: deque[OffloadingEvent] = deque(maxlen=EVENTS_MAX)
        self._jobs_before_reset: frozenset[JobId] = frozenset()
        self.keys_before_reset: set[OffloadKey] = set()
        """Keys of stores in flight at the last reset that no later store has. A tier may report them late."""

    def notice(self, what: str) -> None:
        """Record a change of the tier's state."""
        self._notices.add(self._name, what)

    def skipped(self, reason: str, blocks: Sequence[CPUBlock]) -> None:
        """Record blocks that are not stored to this tier."""
        if blocks:
            self.counters.add("skipped_blocks_total", reason, count=len(blocks))
            if self._history is not None:
                self._history.note(self._number, fate_of(reason), [block.key for block in blocks])

    def ended(self, job: JobMetadata, result: JobResult, done: int, total: int) -> None:
        """Record the result of a job that succeeded for `done` of its `total` blocks."""
        what = "loaded" if job.is_promotion else "stored"
        self.counters.add(f"{what}_blocks_total", count=done)
        self.counters.add(f"{what}_bytes_total", count=done * self._block_bytes)
        if done < total:
            self.failed(job, total - done, result.reason or "failed")
        if job.job_id in self._jobs_before_reset:  # the tier has forgotten these blocks
            result, done = JobResult(job.job_id, False, reason="reset"), 0
        if self._history is not None:
            self._note_fates(self._history, job, result, done)
        if self._event_source is not None:
            self._note_event(job, result)

    def failed(self, job: JobMetadata, num_blocks: int, reason: str) -> None:
        """Count blocks that a job did not load or store."""
        self.counters.add("failed_blocks_total", direction_of(job), reason, count=num_blocks)
        if reason in DAMAGE_REASONS:
            self._notices.add(self._name, "damaged blocks", num_blocks)

    def expired(self, job: JobMetadata) -> None:
        """Record a job whose deadline has passed. In the history, a load's requests report its blocks."""
        self.failed(job, len(job.keys), "expired")
        if self._history is not None and not job.is_promotion:
            self._history.note(self._number, fate_of("expired"), job.keys)

    def note_lookup_timeout(self) -> None:
        """Record that the tier answered a lookup with a miss because it could not know."""
        if self._history is not None:
            self._history.note_lookup_timeout(self._number)

    def reset(self, jobs: Sequence[JobMetadata]) -> None:
        """Record that the tier has forgotten its blocks, including those of `jobs`, which are in flight."""
        self._jobs_before_reset = frozenset(job.job_id for job in jobs)
        self.keys_before_reset = {key for job in jobs if not job.is_promotion for key in job.keys}
        if self._history is not None:
            self._history.reset(self._number)
        self._job_events.clear()
        self._take_from_tier()

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's events since the last call: those of its jobs, then those that it reports itself."""
        reported = self._take_from_tier()
        if reported is None or not self._job_events:
            return reported or []
        events = [*self._job_events, *reported]
        self._job_events.clear()
        return events

    def note_exception(self, operation: str) -> None:
        """Count an exception of the tier; called in an `except` block. Log the first one.

        The log has the exception's type and place, but not its text: a client library may have put a password there.
        """
        self.counters.add("exceptions_total")
        if self.counters["exceptions_total"] == 1:
            self.notice(f"first exception, in {operation}")
            kind, error, traceback = sys.exc_info()
            shown = str(error) if isinstance(error, WrongValueError) else kind.__name__ if kind else ""
            nameless = TierError(shown, tier=self._name, operation=operation)
            about = "tier %r raised in %s; further exceptions are only counted"
            logger.error(about, self._name, operation, exc_info=(TierError, nameless, traceback))

    def _note_event(self, job: JobMetadata, result: JobResult) -> None:
        """Derive an event from a job: a store has stored blocks, a load may have found blocks removed."""
        if self._tier_reports_stored or (job.is_promotion and (result.success or result.reason not in _GONE_REASONS)):
            return
        keys = job.keys if isinstance(job.keys, list) else list(job.keys)
        if not result.success:
            done = frozenset(result.successful_keys or ())
            keys = [key for key in keys if (key in done) is not job.is_promotion]
        if keys:
            self._job_events.append(OffloadingEvent(keys, self._block_bytes, self._name, removed=job.is_promotion))

    def _take_from_tier(self) -> list[OffloadingEvent] | None:
        """Return the events that the tier reports itself; None if it raises an exception."""
        if self._event_source is None:
            return []
        try:
            return [
                OffloadingEvent(keys, self._block_bytes, self._name, event.removed)
                for event in map(checked_event, self._event_source.take_events())
                if (event.removed or self._tier_reports_stored) and (keys := self._current(event))
            ]
        except tier_exceptions():
            self.note_exception("take_events")
            return None

    def _reports_stored(self, event_source: SecondaryTierManager) -> bool:
        try:
            return checked_flag(event_source.reports_stored)
        except tier_exceptions():
            self.note_exception("reports_stored")
            return False

    def _current(self, event: OffloadingEvent) -> list[OffloadKey]:
        """Return the keys of an event without blocks that were stored before a reset."""
        if event.removed or not self.keys_before_reset:
            return event.keys
        return [key for key in event.keys if key not in self.keys_before_reset]

    def _note_fates(self, history: BlockHistory, job: JobMetadata, result: JobResult, done: int) -> None:
        """Record in the history which blocks the tier has gained or lost."""
        keys, is_load = job.keys, job.is_promotion
        if done == len(keys):
            if not is_load:
                history.note(self._number, Fate.STORED, keys)
            return
        ok = frozenset(result.successful_keys or ())
        if done and not is_load:
            history.note(self._number, Fate.STORED, [key for key in keys if key in ok])
        fate = fate_of(result.reason or "failed")
        if not is_load or fate in (Fate.EVICTED, Fate.CORRUPT):  # after other failures the tier still has the block
            history.note(self._number, fate, [key for key in keys if key not in ok])


class TierMeasures:
    """The histograms of one secondary tier. The manager's thread adds, any thread may read.

    Attributes:
        lookup_seconds: How long the tier took to answer a lookup; at most one sample a step.
        noted_s: When the step began that has added its sample.
    """

    __slots__ = ("_job_bytes", "_job_seconds", "lookup_seconds", "noted_s")

    def __init__(self) -> None:
        self.lookup_seconds = Histogram(SHORT_SECONDS)
        self.noted_s = 0.0
        self._job_seconds = {direction: Histogram(SECONDS) for direction in _DIRECTIONS}
        self._job_bytes = {direction: Histogram(BYTES) for direction in _DIRECTIONS}

    def add_job(self, direction: str, seconds: float, size_bytes: int) -> None:
        """Count a job that the tier has reported, successful or not."""
        self._job_seconds[direction].add(seconds)
        self._job_bytes[direction].add(size_bytes)

    def snapshot(self) -> dict[str, Any]:  # Any: as `Histogram.snapshot`, some by direction
        return {
            "job_seconds": {direction: seconds.snapshot() for direction, seconds in self._job_seconds.items()},
            "job_bytes": {direction: sizes.snapshot() for direction, sizes in self._job_bytes.items()},
            "lookup_seconds": self.lookup_seconds.snapshot(),
        }


def direction_of(job: JobMetadata) -> str:
    """Return a job's direction in the counters."""
    return "load" if job.is_promotion else "store"
