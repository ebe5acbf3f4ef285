"""What a tier tells about its blocks, between its workers and the scheduler's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from tiered_kv.base import OffloadingEvent, OffloadKey

KEYS_MAX: Final = 1 << 18
"""Keys that are kept until they are taken, about 20 MB; beyond that the oldest events are lost."""


class EventLog:
    """Blocks that were stored and removed, in that order. Any thread may call, under the lock of the tier's index.

    Only with that lock do the events have the order in which the index changed. `take` needs no lock.

    Args:
        is_wanted: Whether anybody takes the events; if not, nothing is kept.
    """

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._events: deque[tuple[bool, list[OffloadKey]]] = deque()
        self._noted_keys = 0  # written under the index's lock
        self._taken_keys = 0  # written by whoever takes

    def stored(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks that can be loaded from now on."""
        self._note(False, keys)

    def removed(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks that can be loaded no more."""
        self._note(True, keys)

    def clear(self) -> None:
        """Forget all events, after a reset."""
        while self._drop():
            pass

    def take(self, block_bytes: int, medium: str) -> list[OffloadingEvent]:
        """Return the events since the last call; successive ones of one kind are one. The scheduler's thread."""
        events: list[OffloadingEvent] = []
        for _ in range(len(self._events)):
            try:
                is_removed, keys = self._events.popleft()
            except IndexError:  # a worker dropped it
                break
            self._taken_keys += len(keys)
            if events and events[-1].removed is is_removed:
                events[-1].keys += keys
            else:
                events.append(OffloadingEvent(keys, block_bytes, medium, is_removed))
        return events

    def _note(self, is_removed: bool, keys: Iterable[OffloadKey]) -> None:
        if not self._is_wanted:
            return
        batch = list(keys)
        if batch:
            self._events.append((is_removed, batch))
            self._noted_keys += len(batch)
            while self._noted_keys - self._taken_keys > KEYS_MAX and self._drop():
                pass

    def _drop(self) -> bool:
        try:
            _, keys = self._events.popleft()
        except IndexError:
            return False
        self._noted_keys -= len(keys)  # and not as taken, which only `take` counts
        return True
