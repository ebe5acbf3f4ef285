"""The event log of a tier: blocks that were stored or removed, for programs that follow the cache.

A tier that reports stored blocks keeps one. Workers note events under the lock of the tier's index, so events have the
order in which the index changed. The scheduler's thread takes them, without a lock. A log that has no reader stays
empty, and a full log loses its oldest events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from tiered_kv.base import OffloadingEvent, OffloadKey

BATCHES_MAX: Final = 1 << 16
"""Calls of `stored` and `removed` whose events are kept until `take`; of more calls, the oldest are lost."""


class EventLog:
    """Stored and removed blocks, in the order of the calls.

    Any thread may call `stored`, `removed` and `clear`, under the lock of the tier's index: only so the events have the
    order in which the index changed. `take` needs no lock. If `is_wanted` is False, no event is kept.
    """

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._events: deque[tuple[bool, list[OffloadKey]]] = deque(maxlen=BATCHES_MAX)  # (is_removed, keys)

    def stored(self, keys: Iterable[OffloadKey]) -> None:
        self._note(False, keys)

    def removed(self, keys: Iterable[OffloadKey]) -> None:
        self._note(True, keys)

    def clear(self) -> None:
        self._events.clear()

    def take(self, block_bytes: int, medium: str) -> list[OffloadingEvent]:
        """Return the events since the last call; successive events of one kind are one. The scheduler's thread."""
        events: list[OffloadingEvent] = []
        with suppress(IndexError):  # a worker has just cleared it
            for _ in range(len(self._events)):
                is_removed, keys = self._events.popleft()
                if events and events[-1].removed is is_removed:
                    events[-1].keys += keys
                else:
                    events.append(OffloadingEvent(keys, block_bytes, medium, is_removed))
        return events

    def _note(self, is_removed: bool, keys: Iterable[OffloadKey]) -> None:
        if self._is_wanted and (batch := list(keys)):
            self._events.append((is_removed, batch))
