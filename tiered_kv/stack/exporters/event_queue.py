"""The queue of events: what the manager has reported and the publisher has not sent.

The manager's thread adds one batch a step: the queue appends it or drops it. The publisher's thread does the rest. If
too many batches wait, that thread merges the oldest: of each block in each tier only the last event is left. So a
subscriber's index ends as if the subscriber had seen all events. If it merges too late, `AllBlocksCleared` stands for
all batches that waited.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tiered_kv.base import OffloadingEvent, OffloadKey

QUEUE_KEYS_MAX: Final = 1 << 16
"""Keys of the batches. Beyond it the oldest batches are merged, except for the last step's."""
QUEUE_BATCHES_MAX: Final = 1 << 12
"""Batches in the queue, one for each step. Beyond it, too, the oldest are merged."""
MERGED_KEYS_MAX: Final = 1 << 17
"""Keys of the merged batches. Beyond it these batches are dropped, and `AllBlocksCleared` stands for them."""
UNMERGED_KEYS_MAX: Final = 1 << 19
"""Keys that wait until the publisher's thread merges them. Beyond it batches are dropped until that thread runs."""
UNMERGED_BATCHES_MAX: Final = 1 << 15
"""Batches that wait for that thread. Beyond it, too, batches are dropped."""


class StepEvents(NamedTuple):
    """The events of one step, or of several merged steps. If `is_cleared`, all blocks were removed before them."""

    time_s: float
    is_cleared: bool
    events: Sequence[OffloadingEvent]


class EventQueue:
    """A queue with limits, and without a lock: a deque appends and pops atomically, and one thread writes each number.

    An overrun hands the batches over. The manager's thread sets `_is_overrun`, and then leaves the batches alone. The
    publisher's thread empties them, and then resets `_is_overrun`.
    """

    def __init__(self) -> None:
        self._batches: deque[StepEvents] = deque()
        self._is_overrun = False
        # Written by the manager's thread.
        self._added_keys = self._refused_batches = 0
        # Written by the publisher's thread.
        self._taken_keys = self._dropped_batches = 0
        self._merged: _MergedBatches | None = None  # older than all of `_batches`

    def __bool__(self) -> bool:
        return bool(self._batches) or self._merged is not None or self._is_overrun

    @property
    def dropped_batches(self) -> int:
        return self._refused_batches + self._dropped_batches

    def add(self, events: Sequence[OffloadingEvent], *, is_cleared: bool = False) -> None:
        """Append a batch; its keys must not change any more. The manager's thread calls this."""
        batches, keys = self._batches, keys_of(events)
        waiting_keys = self._added_keys - self._taken_keys
        if not self._is_overrun and batches:
            self._is_overrun = waiting_keys + keys > UNMERGED_KEYS_MAX or len(batches) >= UNMERGED_BATCHES_MAX
        if self._is_overrun:
            self._refused_batches += 1
            return
        self._added_keys += keys
        batches.append(StepEvents(time.time(), is_cleared, events))

    def merge(self) -> None:
        """Merge the oldest batches if too many wait. The publisher's thread calls this, also while it sends others."""
        batches = self._batches
        if self._is_overrun:
            self._dropped_batches += len(batches) + (self._merged.count if self._merged else 0)
            batches.clear()
            self._taken_keys = self._added_keys
            self._merged = _MergedBatches(is_cleared=True)
            self._is_overrun = False
        while len(batches) > 1 and (
            len(batches) > QUEUE_BATCHES_MAX or self._added_keys - self._taken_keys > QUEUE_KEYS_MAX
        ):
            self._merged = self._merged or _MergedBatches()
            self._dropped_batches += self._merged.add(self._pop())

    def take(self) -> StepEvents | None:
        """Return the oldest batch; None if there is none. The publisher's thread calls this."""
        self.merge()
        merged, self._merged = self._merged, None
        if merged is not None:
            return merged.as_batch()
        return self._pop() if self._batches else None

    def _pop(self) -> StepEvents:
        batch = self._batches.popleft()
        self._taken_keys += keys_of(batch.events)
        return batch


class _MergedBatches:
    """The last event of each block in each tier, in sets. C code updates them: the scheduler may wait meanwhile."""

    def __init__(self, *, is_cleared: bool = False) -> None:
        self.count = 0
        self._time_s = time.time()
        self._is_cleared = is_cleared
        self._tiers: dict[str, tuple[set[OffloadKey], set[OffloadKey]]] = {}
        """The keys that were stored, and those that were removed, by medium."""
        self._block_size = 0

    def add(self, batch: StepEvents) -> int:
        """Add a later batch; return how many batches had to be dropped."""
        dropped = 0
        if batch.is_cleared:
            self._clear()
        self._time_s = batch.time_s
        self.count += 1
        for event in batch.events:
            self._block_size = event.block_size
            last, other = self._tiers.setdefault(event.medium, (set(), set()))[:: -1 if event.removed else 1]
            try:
                last.update(event.keys)
                other.difference_update(event.keys)
            except TypeError:  # a third-party tier's keys may be of any type
                dropped = 1
        if sum(len(each) for sets in self._tiers.values() for each in sets) > MERGED_KEYS_MAX:
            dropped = self.count
            self._clear()
        return dropped

    def as_batch(self) -> StepEvents:
        events = [
            OffloadingEvent(list(keys), self._block_size, medium, is_removed)
            for medium, (stored, removed) in self._tiers.items()
            for is_removed, keys in ((True, removed), (False, stored))
            if keys
        ]
        return StepEvents(self._time_s, self._is_cleared, events)

    def _clear(self) -> None:
        self._tiers.clear()
        self.count, self._is_cleared = 0, True


def keys_of(events: Iterable[OffloadingEvent]) -> int:
    """Return how many keys events have."""
    return sum(len(event.keys) for event in events)
