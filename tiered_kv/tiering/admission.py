"""Admission: a tier's choice of the offered blocks that are worth a write.

`GuardedTier.select` asks it, on the scheduler's thread, for blocks that the tier lacks. A refused block is counted, and
may be admitted when it is offered again. Memory for the counts has a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Reason

TRACKED_KEYS_MAX = 1 << 20
"""Keys that are counted in each of two generations, in 200 MiB at most."""


def _at_start(row: int) -> int:
    return 0


@dataclass(slots=True, eq=False)
class Offer:
    """Blocks of one request, head first: their keys, and the rows that they are in."""

    keys: list[OffloadKey]
    rows: list[int]
    position_of: Callable[[int], int] = _at_start
    """Returns the position of a row's block in its request's prefix."""
    is_promoted: bool = False
    """Whether they came from a secondary tier."""

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, stop: int | None = None) -> Offer:
        """Return the blocks from place `start` to `stop`; without `stop`, to the end."""
        return Offer(self.keys[start:stop], self.rows[start:stop], self.position_of, self.is_promoted)

    def at(self, places: Sequence[int]) -> Offer:
        """Return the blocks at these places; this object for all places."""
        if len(places) == len(self.rows):
            return self
        keys, rows = [self.keys[place] for place in places], [self.rows[place] for place in places]
        return Offer(keys, rows, self.position_of, self.is_promoted)


class Selection(NamedTuple):
    """Offered blocks in three parts: `stored`, `refused` (not admitted), and `late` (no room in the store budget)."""

    stored: Offer
    refused: Sequence[OffloadKey]
    late: Sequence[OffloadKey]


class Admission:
    """Admits a block at its offer number `admit_after`, so that blocks which are used once do not wear an SSD.

    Counts are kept in two generations. When the younger one is full, it replaces the older one: memory has a limit
    without work for each key. Owned by the manager's thread.
    """

    reason: ClassVar[Reason] = Reason.ADMISSION
    """The reason in counters for blocks that are not admitted."""
    has_clock: ClassVar[bool] = False
    """Whether `tick` has something to do."""

    def __init__(self, admit_after: int) -> None:
        self._admit_after = admit_after
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}

    def is_open(self) -> bool:
        """Return whether everything is admitted."""
        return self._admit_after <= 1

    def begin(self, req_id: str) -> None:
        """Note that a request begins. An earlier request with this id has ended."""

    def select(self, offered: Offer, room: int, req_id: str) -> Selection:
        """Choose at most `room` blocks of one request. The offer of a block without room is not counted."""
        if self.is_open():
            if room >= len(offered):
                return Selection(offered, (), ())
            return Selection(offered.part(0, room), (), offered.keys[room:])
        places: list[int] = []
        refused: list[OffloadKey] = []
        for place, key in enumerate(offered.keys):
            if len(places) == room:
                return Selection(offered.at(places), refused, offered.keys[place:])
            if self.admit(key):
                places.append(place)
            else:
                refused.append(key)
        return Selection(offered.at(places), refused, ())

    def again(self, loaded: Offer, req_id: str) -> Offer:
        """Return which blocks to offer again, of blocks that a request has loaded from elsewhere than this tier."""
        return loaded

    def note_hits(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier loads these blocks."""

    def tick(self) -> None:
        """Note the time; called once a step, if it `has_clock`."""

    def snapshot(self) -> Mapping[str, int]:
        """Return counters; any thread may call."""
        return {}

    def admit(self, key: OffloadKey) -> bool:
        """Count one offer of `key`, and return whether to store it."""
        offers = self._young.get(key) or self._old.get(key, 0)
        offers += 1
        if offers >= self._admit_after:
            self._young.pop(key, None)
            self._old.pop(key, None)
            return True
        if len(self._young) >= TRACKED_KEYS_MAX:
            self._old, self._young = self._young, {}
        self._young[key] = offers
        return False
