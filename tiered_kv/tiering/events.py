"""The events of a secondary tier: what its jobs stored, and what the tier itself reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from tiered_kv.base import OffloadingEvent
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.toolkit.status import UNUSABLE_REASONS

EVENTS_MAX: Final = 1 << 12
"""Events of one tier that are kept until they are taken; beyond that the oldest are lost."""

_GONE_REASONS: Final = UNUSABLE_REASONS | {"absent", "missing"}
"""Reasons for which a load fails whose block is not in the tier, or is of no use there."""


class EventSink(Protocol):
    """Gets the events of all tiers at the end of each step, on the manager's thread; no method waits but `close`."""

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        """Take events, oldest first, whose keys change no more; a secondary tier's medium is the tier's name."""

    def clear(self) -> None:
        """Note that every block of every tier was removed."""

    def counted(self) -> dict[str, int]:
        """Return counts by name, for the primary tier's counters."""

    def close(self) -> None:
        """Deliver what was taken, for a short time."""


class TierEvents:
    """The events of one guarded tier. Owned by the manager's thread.

    Args:
        tier: The tier.
        name: Its name, the medium of its events.
        block_bytes: Bytes of one block.
    """

    def __init__(self, tier: SecondaryTierManager, name: str, block_bytes: int) -> None:
        self._tier = tier
        self._name = name
        self._block_bytes = block_bytes
        self._tells_stored = tier.tells_stored
        self._noted: deque[OffloadingEvent] = deque(maxlen=EVENTS_MAX)

    def note(self, job: JobMetadata, result: JobResult) -> None:
        """Note what a job that ended tells about its blocks: a store has stored them, a load may have found none."""
        if self._tells_stored or (job.is_promotion and (result.success or result.reason not in _GONE_REASONS)):
            return
        keys = job.keys if isinstance(job.keys, list) else list(job.keys)
        if not result.success:
            done = frozenset(result.successful_keys or ())
            keys = [key for key in keys if (key in done) is not job.is_promotion]
        if keys:
            self._noted.append(OffloadingEvent(keys, self._block_bytes, self._name, removed=job.is_promotion))

    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call.

        Raises:
            Exception: Whatever the tier raises; what was noted of its jobs comes with the next call.
        """
        told = [
            OffloadingEvent(list(event.keys), self._block_bytes, self._name, bool(event.removed))
            for event in self._tier.take_events()
            if event.removed or self._tells_stored
        ]
        if not self._noted:
            return told
        noted = [*self._noted, *told]
        self._noted.clear()
        return noted

    def reset(self) -> None:
        """Forget every event.

        Raises:
            Exception: Whatever the tier raises.
        """
        self._noted.clear()
        list(self._tier.take_events())
