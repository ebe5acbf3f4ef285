"""Accounts: they count each event of a block in a tier once, and pass it to the history and to the sink of events.

`GuardedTier` and the manager call them on the scheduler's thread; any thread may call `measure`. An account does no
I/O. What must stay true: a block's event comes once, from the job's result or from the tier's own report.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.errors import TierError
from tiered_kv.metrics.counters import Counters
from tiered_kv.metrics.histogram import BYTES, SECONDS, SHORT_SECONDS, Histogram
from tiered_kv.metrics.history.ledger import CPU, RequestLog
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.metrics.notices import Notices
from tiered_kv.metrics.series import Family, by_label, numbers
from tiered_kv.metrics.vocabulary import ACCOUNT, DIRECTIONS, EVENTS, HISTORY, MANAGER, SECONDARY
from tiered_kv.reasons import Fate, Learning, Reason, TooSlow
from tiered_kv.received import LoadCounts, count_load, groups_of
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.tiering.answers import WrongValueError, checked_event, checked_flag, tier_exceptions
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.spell import Lost

logger = logging.getLogger(__name__)

EVENTS_MAX: Final = 1 << 12
"""Events of a tier's jobs that are kept until they are taken; the oldest are dropped."""

_SETTLED_KEYS_MAX = 512
"""Limit of the keys that `measure` takes from the history's queue, in about 100 us. Its thread takes all others."""


class TierAccount:
    """Counts the events of one guarded tier, and records them for history and followers. Owned by the manager's thread.

    It takes each event once, by one method.

    `event_source` is the tier itself if its events are collected, else None. `GuardedTier` explains other arguments.
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
        self._counters = Counters(ACCOUNT.values())
        self._log_limit = LogLimit()
        self._lookup_seconds = Histogram(SHORT_SECONDS)
        self._looked_up_s = 0.0  # beginning of the step of the last delayed answer
        self._job_seconds = {direction: Histogram(SECONDS) for direction in DIRECTIONS}
        self._job_bytes = {direction: Histogram(BYTES) for direction in DIRECTIONS}
        self._name = name
        self._number = number
        self._block_bytes = block_bytes
        self._notices = notices
        self._history = history
        self._event_source = event_source
        self._tier_reports_stored = event_source is not None and self._reports_stored(event_source)
        self._job_events: deque[OffloadingEvent] = deque(maxlen=EVENTS_MAX)
        self._jobs_before_reset: frozenset[JobId] = frozenset()
        self._keys_before_reset: set[OffloadKey] = set()
        """Keys of stores in flight at the last reset that were not stored again since. A tier may report them late."""

    def follow(self, tier: SecondaryTierManager) -> None:
        """Collect the events of another object for the same tier from now on."""
        if self._event_source is not None:
            self._event_source = tier

    def notice(self, what: str) -> None:
        """Record a change of the tier's state."""
        self._notices.add(self._name, what)

    # Lookups.

    def lookups_timed_out(self, count: int = 1, *, is_for_history: bool = False) -> None:
        """Count lookups without an answer in time; `is_for_history` if the tier itself answered them with a miss."""
        self._counters.add("lookup_timeouts_total", count=count)
        if is_for_history and self._history is not None:
            self._history.note_lookup_timeout(self._number)

    def looked_up(self, seconds: float, step_s: float) -> bool:
        """Note how long an answer took that was None before; return whether it is the first in the step of `step_s`."""
        is_first = self._looked_up_s != step_s
        if is_first:
            self._looked_up_s = step_s
            self._lookup_seconds.add(seconds)
        return is_first

    def refused_promotion(self) -> None:
        """Count a block that the tier has, and for which there is no room."""
        self._counters.add("refused_promotion_blocks_total")

    def too_slow(self, blocks: int, reason: TooSlow) -> None:
        """Count blocks that the engine computes, since the tier is too slow."""
        self._counters.add("too_slow_blocks_total", reason.value, count=blocks)

    # Jobs.

    def skipped(self, reason: Reason, keys: Collection[OffloadKey]) -> None:
        """Record blocks that are not stored to this tier."""
        if keys:
            self._counters.add("skipped_blocks_total", reason.value, count=len(keys))
            if self._history is not None:
                self._history.note(self._number, reason.fate, keys)

    def offered_again(self, blocks: int) -> None:
        """Count blocks that are stored again because the tier lacked them when they were used."""
        self._counters.add("offered_again_blocks_total", count=blocks)

    def submitted(self, job: JobMetadata) -> None:
        """Record a job that the tier has accepted."""
        self._counters.add("submitted_jobs_total", _direction_of(job))
        if not job.is_promotion and self._keys_before_reset:
            self._keys_before_reset.difference_update(job.keys)

    def learning(self, reason: Learning) -> None:
        """Count a load from which the tier's times are learned."""
        self._counters.add("learning_jobs_total", reason.value)

    def reported(self, job: JobMetadata, seconds: float, *, is_late: bool) -> None:
        """Record that the tier has reported a job, `is_late` after its deadline; if in time, `ended` is called next."""
        direction = _direction_of(job)
        self._job_seconds[direction].add(seconds)
        self._job_bytes[direction].add(len(job.block_ids) * self._block_bytes)
        if is_late:
            self._counters.add("late_jobs_total")

    def ended(self, job: JobMetadata, result: JobResult, done: int, total: int) -> None:
        """Record the result of a job that succeeded for `done` of its `total` blocks."""
        what = "loaded" if job.is_promotion else "stored"
        self._counters.add(f"{what}_blocks_total", count=done)
        self._counters.add(f"{what}_bytes_total", count=done * self._block_bytes)
        if done < total:
            self.failed(job, total - done, result.cause, result.word)
        if job.job_id in self._jobs_before_reset:  # the tier has forgotten these blocks
            result, done = JobResult(job.job_id, False, reason=Reason.RESET), 0
        if self._history is not None:
            self._note_fates(self._history, job, result, done)
        if self._event_source is not None:
            self._note_event(job, result)

    def failed(self, job: JobMetadata, num_blocks: int, reason: Reason, word: str = "") -> None:
        """Count blocks that a job did not load or store; `word` is the tier's own for the reason, if it has one."""
        self._counters.add("failed_blocks_total", _direction_of(job), word or reason.value, count=num_blocks)
        if reason.is_damage:
            self._notices.add(self._name, "damaged blocks", num_blocks)

    def lost(self) -> Lost:
        """Return how many blocks the tier failed to store or load, or was not given because its breaker was open."""
        failed, skipped = "failed_blocks_total", "skipped_blocks_total"
        stores = self._counters.total(failed, "store") + self._counters.total(skipped, Reason.BREAKER.value)
        return Lost(stores, self._counters.total(failed, "load"))

    def expired(self, job: JobMetadata) -> None:
        """Record a job at its deadline. The requests of a load report its blocks to the history."""
        self._counters.add("expired_jobs_total")
        self.failed(job, len(job.keys), Reason.EXPIRED)
        if self._history is not None and not job.is_promotion:
            self._history.note(self._number, Reason.EXPIRED.fate, job.keys)

    def unknown_result(self) -> None:
        """Count a result for no job of the tier."""
        self._counters.add("unknown_results_total")

    def reset(self, jobs: Sequence[JobMetadata]) -> None:
        """Record that the tier has forgotten its blocks, including the blocks of `jobs`, which are in flight."""
        self._jobs_before_reset = frozenset(job.job_id for job in jobs)
        self._keys_before_reset = {key for job in jobs if not job.is_promotion for key in job.keys}
        if self._history is not None:
            self._history.reset(self._number)
        self._job_events.clear()
        self._take_from_tier()

    def take_events(self) -> list[OffloadingEvent]:
        """Return the tier's events since the last call: the events of its jobs, then its own reports."""
        reported = self._take_from_tier()
        if reported is None or not self._job_events:
            return reported or []
        events = [*self._job_events, *reported]
        self._job_events.clear()
        return events

    def note_exception(self, operation: str) -> None:
        """Count an exception of the tier; called in an `except` block. Log it, at a bounded rate for each method.

        The log has the exception's type and place, but not its text: a client library may have put a password there.
        """
        self._counters.add("exceptions_total")
        if self._counters["exceptions_total"] == 1:
            self.notice(f"first exception, in {operation}")
        if self._log_limit.take(operation) is not None:
            kind, error, traceback = sys.exc_info()
            shown = str(error) if isinstance(error, WrongValueError) else kind.__name__ if kind else ""
            nameless = TierError(shown, tier=self._name, operation=operation)
            about = "tier %r raised in %s; %s"
            logger.error(about, self._name, operation, self._log_limit.about, exc_info=(TierError, nameless, traceback))

    def measure(self) -> Iterator[tuple[str, list[Family]]]:
        """Yield all counters and histograms, for a `Registry`. Any thread may call."""
        yield (
            self._name,
            [
                *self._counters.families(),
                by_label(SECONDARY["job_seconds"], {name: each.snapshot() for name, each in self._job_seconds.items()}),
                by_label(SECONDARY["job_bytes"], {name: each.snapshot() for name, each in self._job_bytes.items()}),
                Family(SECONDARY["lookup_seconds"], {(): self._lookup_seconds.snapshot()}),
            ],
        )

    def _note_event(self, job: JobMetadata, result: JobResult) -> None:
        """Derive an event from a job: a store has stored blocks, a load may have found blocks removed."""
        if self._tier_reports_stored or (job.is_promotion and (result.success or not result.cause.is_gone)):
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
        if event.removed or not self._keys_before_reset:
            return event.keys
        return [key for key in event.keys if key not in self._keys_before_reset]

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
        fate = result.cause.fate
        if not is_load or fate in (Fate.EVICTED, Fate.CORRUPT):  # the tier still has the block after other failures
            history.note(self._number, fate, [key for key in keys if key not in ok])


class EventSink(Protocol):
    """Receives the events of all tiers at each step's end; see `EventPublisher`. Only `close` may wait."""

    def publish(self, events: Sequence[OffloadingEvent]) -> None: ...
    def clear(self) -> None: ...
    def snapshot(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class PrimaryAccount:
    """Counts the engine's stores and loads, and passes them to the history and the sink of events.

    Both are optional, and `close` closes both. All methods belong to the manager's thread, unless they say otherwise.
    """

    def __init__(
        self,
        rows: PrimaryRows,
        accounts: Sequence[TierAccount],
        history: BlockHistory | None,
        event_sink: EventSink | None,
        block_tokens: int,
    ) -> None:
        self._stored_blocks = self._loaded_blocks = 0
        self._loaded_by_group: Counter[bytes] = Counter()  # an engine loads a token in each KV cache group
        self._rows = rows
        self._accounts = accounts
        self._history = history
        self._event_sink = event_sink
        self._block_tokens = block_tokens
        if history is not None:
            rows.tell(history)

    def loaded(
        self,
        keys: Collection[OffloadKey],
        log: RequestLog | None,
        sources: Mapping[OffloadKey, str],
        counts: LoadCounts,
    ) -> None:
        """Record blocks that a request loads, and the tiers of promoted ones. With a history, it has a log."""
        if self._history is not None and log is not None:
            self._history.loaded(log, keys, sources)
        self._loaded_blocks += len(keys)
        groups = groups_of(keys)
        if count_load(counts, groups, keys, sources):  # hot path: `update` takes twice as long
            self._loaded_by_group[groups[0]] += len(groups)
        else:
            self._loaded_by_group.update(groups)

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Record blocks that the engine has stored."""
        self._stored_blocks += len(keys)
        if self._history is not None:
            self._history.stored(keys)

    def request_ended(self, log: RequestLog | None, waited_s: float) -> None:
        """Record the end of a request; it has no log if it never asked for blocks."""
        if log is not None and self._history is not None:
            log.waited_s = waited_s
            self._history.ended(log)

    def resetting(self) -> None:
        """Record that the primary tier is about to forget its blocks."""
        if self._history is not None:
            self._history.reset(CPU)

    def _counts(self) -> dict[str, int]:
        block_bytes = self._rows.backend.block_size
        return {
            "stored_blocks_total": self._stored_blocks,
            "stored_bytes_total": self._stored_blocks * block_bytes,
            "loaded_blocks_total": self._loaded_blocks,
            "loaded_bytes_total": self._loaded_blocks * block_bytes,
            "block_tokens": self._block_tokens,
            "restored_tokens_total": max([*self._loaded_by_group.values()], default=0) * self._block_tokens,
        }

    def measure(self) -> Iterator[tuple[str, list[Family]]]:
        """Yield the counts of the primary tier, the sink, and the history of all tiers. Any thread may call."""
        yield PRIMARY_NAME, numbers(MANAGER, self._counts())
        if self._event_sink is not None:
            yield PRIMARY_NAME, numbers(EVENTS, self._event_sink.snapshot())
        if self._history is not None:
            self._history.settle(_SETTLED_KEYS_MAX)
            yield PRIMARY_NAME, numbers(HISTORY, {"unexplained_blocks_total": self._history.dropped_blocks})
            for tier, counted in zip(self._history.names, self._history.snapshot(), strict=True):
                yield tier, [by_label(HISTORY[name], values) for name, values in counted.items()]

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of all tiers since the last call."""
        events = self._rows.take_events()
        for account in self._accounts:
            events += account.take_events()
        return events

    def publish(self) -> None:
        """Pass the events since the last call to the sink."""
        if self._event_sink is not None:
            events = self.take_events()
            if events:
                self._event_sink.publish(events)

    def publish_reset(self) -> None:
        """Report to the sink that every block of every tier was removed."""
        if self._event_sink is not None:
            self._rows.take_events()  # one event for each block, which `clear` replaces
            self._event_sink.clear()

    def settle(self) -> None:
        """Wait until the history has processed its queue."""
        if self._history is not None:
            self._history.settle()

    def close(self) -> None:
        """Deliver the last events, and end the history's thread."""
        self.publish()
        if self._event_sink is not None:
            self._event_sink.close()
        if self._history is not None:
            self._history.close()


def _direction_of(job: JobMetadata) -> str:
    return "load" if job.is_promotion else "store"
