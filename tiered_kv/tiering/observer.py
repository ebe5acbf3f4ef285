"""What the manager tells others: its counts, the events of all tiers, and the history of blocks and requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.cpu.manager import PRIMARY_NAME, CPUOffloadingManager
from tiered_kv.hints import BY_REQUEST
from tiered_kv.observe.history import BlockHistory
from tiered_kv.observe.ledger import CPU
from tiered_kv.observe.step_timer import StepTimer
from tiered_kv.tiering.audit import Audit
from tiered_kv.tiering.events import EventSink
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.promotion import Promotions
from tiered_kv.tiering.requests import RequestState, RequestTable
from tiered_kv.tiering.search import Search

_SETTLED_KEYS_MAX = 512
"""Keys that `counters` takes from the history's queue, in about 100 us; more are left to its thread."""
_GROUP_BYTES = 4
_group_of = itemgetter(slice(-_GROUP_BYTES, None))


class Observer:
    """Counts and passes on what happens in the manager, when the manager says so; it changes nothing there.

    All methods but `counters` and `disabled_tiers` belong to the manager's thread.

    Args:
        manager: The manager, whose steps are timed.
        primary: The primary tier.
        tiers: The tiers below it.
        search: What asks them.
        promotions: What loads from them.
        requests: The state of each request.
        audit: What compares blocks; None for nothing.
        history: Where it is noted why requests missed blocks; None for nowhere. Closed with this object.
        event_sink: Who gets the events of all tiers; None for nobody. Closed with this object.
        block_tokens: Tokens that a block holds; 0 where nobody knows.
        clock: Seconds of a monotonic clock.

    Attributes:
        timer: Measures the manager's steps.
        stored_blocks: Blocks that the engine has stored.
        released_holds: Promoted blocks that nobody loaded in time.
    """

    def __init__(
        self,
        manager: object,
        primary: CPUOffloadingManager,
        tiers: Sequence[GuardedTier],
        search: Search,
        promotions: Promotions,
        requests: RequestTable,
        audit: Audit | None,
        history: BlockHistory | None,
        event_sink: EventSink | None,
        block_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.timer = StepTimer(manager, clock)
        self.stored_blocks = self.released_holds = 0
        self._loaded_blocks = 0
        self._loaded_by_group: Counter[bytes] = Counter()  # an engine loads a token once for each of its groups
        self._primary = primary
        self._tiers = tiers
        self._search = search
        self._promotions = promotions
        self._requests = requests
        self._audit = audit
        self._history = history
        self._event_sink = event_sink
        self._block_tokens = block_tokens
        if history is not None:
            primary.evicted_keys = history.evicted

    # The history.

    def report(self) -> None:
        """Pass on to the history what was missed and evicted since the last call."""
        self._search.report()
        if self._history is not None:
            self._primary.evicted_keys = self._history.turn_evicted()

    def report_end(self, state: RequestState) -> None:
        """Pass on to the history that a request has ended."""
        self._search.report()
        if state.log is not None and self._history is not None:
            self._history.ended(state.log, state.troubles)

    def report_reset(self) -> None:
        """Pass on to the history that the primary tier is about to forget its blocks."""
        self.report()
        if self._history is not None:
            self._history.reset(CPU, self._primary.blocks)

    def loaded(self, keys: Collection[OffloadKey], state: RequestState | None) -> None:
        """Count and note blocks that a request loads; with a history its state is known."""
        if self._history is not None and state is not None:
            self._history.loaded(self._search.log_of(state), keys, state.sources)
        self._loaded_blocks += len(keys)
        self._loaded_by_group.update(map(_group_of, keys))

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Count and note blocks that the engine has stored, once the history knows who missed them before."""
        self.report()
        self.stored_blocks += len(keys)
        if self._history is not None:
            self._history.stored(keys)

    def settle(self) -> None:
        """Wait until the history has taken what was noted."""
        if self._history is not None:
            self._history.settle()

    def close_history(self) -> None:
        """End the history's thread."""
        if self._history is not None:
            self._history.close()

    # Events.

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of all tiers since the last call."""
        events = list(self._primary.take_events())
        for guarded in self._tiers:
            events += guarded.observer.take_events()
        return events

    def publish(self) -> None:
        """Give the events since the last call to whoever gets them."""
        if self._event_sink is not None:
            events = self.take_events()
            if events:
                self._event_sink.publish(events)

    def publish_reset(self) -> None:
        """Note for whoever gets the events that every block of every tier was removed."""
        if self._event_sink is not None:
            self._primary.take_events()  # each of its blocks; one event for all tiers says more
            self._event_sink.clear()

    def close_events(self) -> None:
        """Deliver the last events, for a short time."""
        self.publish()
        if self._event_sink is not None:
            self._event_sink.close()

    # Counts.

    def counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        """Return all counts by tier, a secondary tier's own `stats` under "tier". Any thread may call."""
        blocks, block_bytes = len(self._primary.blocks), self._primary.backend.block_size
        counted: dict[str, dict[str, Any]] = {
            PRIMARY_NAME: {
                "used_blocks": blocks,
                "used_bytes": blocks * block_bytes,
                "capacity_bytes": self._primary.backend.num_blocks * block_bytes,
                "stored_blocks_total": self.stored_blocks,
                "stored_bytes_total": self.stored_blocks * block_bytes,
                "loaded_blocks_total": self._loaded_blocks,
                "loaded_bytes_total": self._loaded_blocks * block_bytes,
                "restored_tokens_total": max([*self._loaded_by_group.values()], default=0) * self._block_tokens,
                "evicted_blocks_total": self._primary.evicted_blocks,
                "promotion_blocks": self._promotions.blocks_taken,
                "released_holds_total": self.released_holds,
                "forgotten_requests_total": self._requests.forgotten,
                "hinted_requests_total": self._primary.hint_reader.hinted,
                "refused_hints_total": self._primary.hint_reader.refused,
                "step_seconds": self.timer.seconds.snapshot(),
            }
        }
        if self._primary.skipped_blocks:
            counted[PRIMARY_NAME]["skipped_blocks_total"] = {BY_REQUEST: self._primary.skipped_blocks}
        counted |= {guarded.name: guarded.counted() for guarded in self._tiers}
        if self._history is not None:
            self._history.settle(_SETTLED_KEYS_MAX)
            counted[PRIMARY_NAME]["unexplained_blocks_total"] = self._history.dropped_blocks
            for name, values in zip(self._history.names, self._history.counted(), strict=True):
                counted[name].update(values)
        if self._audit is not None:
            for name, values in self._audit.counted().items():
                counted[name].update(values)
        if self._event_sink is not None:
            counted[PRIMARY_NAME].update(self._event_sink.counted())
        return counted

    def disabled_tiers(self) -> set[str]:
        """Return the names of the tiers that are not used any more. Any thread may call."""
        return {guarded.name for guarded in self._tiers if guarded.is_disabled}
