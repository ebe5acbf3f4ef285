"""What the manager reports: stored and loaded blocks, events of all tiers, and the history of blocks and requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from tiered_kv.base import OffloadingEvent, OffloadKey, group_of
from tiered_kv.cpu.manager import PRIMARY_NAME, CPUOffloadingManager
from tiered_kv.history.ledger import CPU
from tiered_kv.history.recorder import BlockHistory
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.requests import RequestState, RequestTable

_SETTLED_KEYS_MAX = 512
"""Keys that `add_counts` takes from the history's queue, in about 100 us; more are left to the history's thread."""


class EventSink(Protocol):
    """Receives the events of all tiers at the end of each step, on the manager's thread. Only `close` may wait."""

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        """Take events, oldest first. Their keys do not change any more; the medium is the tier's name."""

    def clear(self) -> None:
        """Note that every block of every tier was removed."""

    def snapshot(self) -> dict[str, int]:
        """Return counts by name, for the primary tier's counters."""

    def close(self) -> None:
        """Deliver the remaining events, within a short time."""


class Observer:
    """Counts blocks, and passes events and the history on to an event sink and a history, both optional.

    Closes both. All methods belong to the manager's thread, unless they say otherwise.
    """

    def __init__(
        self,
        primary: CPUOffloadingManager,
        tiers: Sequence[GuardedTier],
        requests: RequestTable,
        history: BlockHistory | None,
        event_sink: EventSink | None,
        block_tokens: int,
    ) -> None:
        self._stored_blocks = self._loaded_blocks = 0
        self._loaded_by_group: Counter[bytes] = Counter()  # an engine loads a token once for each of its groups
        self._primary = primary
        self._tiers = tiers
        self._requests = requests
        self._history = history
        self._event_sink = event_sink
        self._block_tokens = block_tokens
        if history is not None:
            primary.on_evicted = history.evict

    def loaded(self, keys: Collection[OffloadKey], state: RequestState) -> None:
        """Record blocks that a request loads."""
        if self._history is not None:
            self._history.loaded(self._requests.log_of(state), keys, state.sources)
        self._loaded_blocks += len(keys)
        self._loaded_by_group.update(map(group_of, keys))

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Record blocks that the engine has stored."""
        self._stored_blocks += len(keys)
        if self._history is not None:
            self._history.stored(keys)

    def request_ended(self, state: RequestState) -> None:
        """Record the end of a request."""
        if state.log is not None and self._history is not None:
            self._history.ended(state.log)

    def resetting(self) -> None:
        """Record that the primary tier is about to forget its blocks."""
        if self._history is not None:
            self._history.reset(CPU, self._primary.blocks)

    def snapshot(self) -> dict[str, int]:
        """Return the counters of stored and loaded blocks. Any thread may call."""
        block_bytes = self._primary.backend.block_size
        return {
            "stored_blocks_total": self._stored_blocks,
            "stored_bytes_total": self._stored_blocks * block_bytes,
            "loaded_blocks_total": self._loaded_blocks,
            "loaded_bytes_total": self._loaded_blocks * block_bytes,
            "restored_tokens_total": max([*self._loaded_by_group.values()], default=0) * self._block_tokens,
        }

    def add_counts(self, counters: dict[str, dict[str, Any]]) -> None:  # Any: as `Counters.snapshot`
        """Add the counts of the history and the sink to the counters of all tiers. Any thread may call."""
        if self._history is not None:
            self._history.settle(_SETTLED_KEYS_MAX)
            counters[PRIMARY_NAME]["unexplained_blocks_total"] = self._history.dropped_blocks
            for name, values in zip(self._history.names, self._history.snapshot(), strict=True):
                counters[name].update(values)
        if self._event_sink is not None:
            counters[PRIMARY_NAME].update(self._event_sink.snapshot())

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of all tiers since the last call."""
        events = list(self._primary.take_events())
        for guarded in self._tiers:
            events += guarded.observer.take_events()
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
            self._primary.take_events()  # one event for each block, which `clear` replaces
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
