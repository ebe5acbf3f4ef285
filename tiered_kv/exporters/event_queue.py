"""The queue of events: what the manager has reported and the publisher has not sent.

The manager's thread adds one batch a step; the publisher's thread takes them. If too many wait, the oldest are merged:
of each block in each tier only the last event is left, so a subscriber's index ends as if it had seen all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tiered_kv.base import OffloadingEvent, OffloadKey

QUEUE_KEYS_MAX: Final = 1 << 16
"""Keys of the batches. Beyond it the oldest batches are merged, except for the last step's."""
QUEUE_BATCHES_MAX: Final = 1 << 12
"""Batches in the queue, one for each step; likewise."""
MERGED_KEYS_MAX: Final = 1 << 17
"""Keys of the merged batches. Beyond it they are dropped, and `AllBlocksCleared` stands for them."""


class StepEvents(NamedTuple):
    """What one step reported, or several merged ones: first whether every block is gone, then the events."""

    time_s: float
    is_cleared: bool
    events: Sequence[OffloadingEvent]


class EventQueue:
    """Has a limit. The lock is held to take one batch out, never during I/O."""

    def __init__(self) -> None:
        self.dropped_batches = 0
        self._batches: deque[StepEvents] = deque()
        self._added_keys = self._taken_keys = 0
        self._taking = threading.Lock()
        self._merged: _MergedBatches | None = None  # older than the batches

    def __bool__(self) -> bool:
        return bool(self._batches) or self._merged is not None

    def add(self, events: Sequence[OffloadingEvent], *, is_cleared: bool = False) -> None:
        """Append a batch, whose keys must not change. The manager's thread calls this."""
        batches = self._batches
        self._added_keys += keys_of(events)
        batches.append(StepEvents(time.time(), is_cleared, events))
        while len(batches) > 1 and (
            len(batches) > QUEUE_BATCHES_MAX or self._added_keys - self._taken_keys > QUEUE_KEYS_MAX
        ):
            with self._taking:
                if batches:  # the publisher may just have taken them
                    self._merge(self._pop())

    def take(self) -> StepEvents | None:
        """Return the oldest batch; None if there is none. The publisher's thread calls this."""
        with self._taking:
            merged, self._merged = self._merged, None
            if merged is None:
                return self._pop() if self._batches else None
        return merged.as_batch()

    def _pop(self) -> StepEvents:
        batch = self._batches.popleft()
        self._taken_keys += keys_of(batch.events)
        return batch

    def _merge(self, batch: StepEvents) -> None:
        if self._merged is None:
            self._merged = _MergedBatches()
        self.dropped_batches += self._merged.add(batch)


class _MergedBatches:
    """The last event of each block in each tier."""

    def __init__(self) -> None:
        self._time_s = 0.0
        self._count = 0
        self._is_cleared = False
        self._tiers: dict[str, dict[OffloadKey, bool]] = {}  # whether the block was removed, by medium and key
        self._block_size = 0

    def add(self, batch: StepEvents) -> int:
        """Add a later batch; return how many batches had to be dropped."""
        dropped = 0
        if batch.is_cleared:
            self._clear()
        self._time_s = batch.time_s
        self._count += 1
        for event in batch.events:
            self._block_size = event.block_size
            try:
                self._tiers.setdefault(event.medium, {}).update(dict.fromkeys(event.keys, event.removed))
            except TypeError:  # a third-party tier's keys that are none
                dropped = 1
        if sum(map(len, self._tiers.values())) > MERGED_KEYS_MAX:
            dropped = self._count
            self._clear()
        return dropped

    def as_batch(self) -> StepEvents:
        events = []
        for medium, keys in self._tiers.items():
            for removed in (True, False):
                of_kind = [key for key, is_removed in keys.items() if is_removed is removed]
                if of_kind:
                    events.append(OffloadingEvent(of_kind, self._block_size, medium, removed))
        return StepEvents(self._time_s, self._is_cleared, events)

    def _clear(self) -> None:
        self._tiers.clear()
        self._count, self._is_cleared = 0, True


def keys_of(events: Iterable[OffloadingEvent]) -> int:
    """Return how many keys events have."""
    return sum(len(event.keys) for event in events)
