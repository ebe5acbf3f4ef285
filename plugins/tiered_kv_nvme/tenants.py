"""The tenants of a directory, with `limits`: whose the bytes in its segments are, and which of them have to stay.

`SegmentPool` has one `SegmentShares`, and calls it under its lock. Workers count what they store, the reclaimer asks
which segment to take, and what to move. A segment has blocks of all tenants, in the order of their stores:
`Segment.held` counts the bytes of each, and the segment's table has a number for each block.

Room is made a segment at a time. `tiered_kv.shares` says how many bytes each tenant loses for it. It loses them only
where its oldest blocks are; what a segment has of a tenant besides is protected, and moves. The reclaimer takes a
segment of which at most a quarter is protected: among several the one whose loss costs least. If there is none, it
takes the one with the smallest protected part, and moves at most half of the segment, which limits the extra writes.

What must stay true: a tenant's `held` is the sum of what the segments of the present epoch hold. Blocks count for
nobody if no summary says whose they are: those of segments that were being filled at a crash, or were filled without
`limits`. They go before those of any tenant.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Final

import numpy as np

from tiered_kv.config.limits import TenantLimits
from tiered_kv.shares import Shares, Tenant
from tiered_kv.system.step import give_way
from tiered_kv_nvme.layout import EntryTable
from tiered_kv_nvme.segment import Segment
from tiered_kv_nvme.worth import SEGMENTS_PER_RANKING, Worth

NOBODY: Final = 0
"""The number of no tenant."""
PROTECTED_SHARE_MAX: Final = 0.25
"""A segment of which more is protected is reclaimed only if there is no other."""
MOVED_SHARE_MAX: Final = 0.5
"""The share of a segment that may move because it is protected."""
OLD_SHARE: Final = 0.25
"""The share of a tenant's bytes that counts as its oldest. With much less, no segment has enough of them. With all, a
tenant at its share loses new blocks, in the segments of one that floods the tier, and keeps old ones, which moved."""

SLACK_SHARE: Final = 1 / 8
"""The share of a segment that a tenant over its share may lose beyond what the rule takes. Without it, tenants of one
rate protect what chance gave each of a segment: eight moved 66 blocks for 100 that they stored, and 39 with it."""


class SegmentTenant(Tenant):
    """A tenant, and its number in tables."""

    __slots__ = ("number",)

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name)
        self.number = number


class SegmentShares:
    """The tenants of a directory, and what they lose. "Locked" as in `SegmentPool`."""

    def __init__(self, limits: TenantLimits, capacity_bytes: int) -> None:
        self.names = [""]
        """The tenants' names by their numbers. Any thread may read: it only grows."""
        self._tenants: list[SegmentTenant] = []  # from number 1 on
        self._nobody = SegmentTenant("", NOBODY)
        self._shares = Shares(limits, capacity_bytes, 1, self._add)
        self._ages: dict[tuple[int, int, int], Mapping[int, float]] = {}
        """The reclaimer's: mean ages by tenant, of a segment in a generation at a tick."""
        self._ranked: list[Segment] = []  # the reclaimer's: by what their loss costs, those that were not chosen since
        self._serves = 0  # how often the ranking may still serve
        self.numbers = self._shares.numbers
        """Returns the metrics of `stats`."""

    def _add(self, name: str) -> SegmentTenant:
        tenant = SegmentTenant(name, len(self.names))
        self._tenants.append(tenant)
        self.names.append(name)
        return tenant

    def number(self, name: str) -> int:
        """Locked. Return the number of a tenant."""
        return self._shares.tenant(name).number

    def count(self, segment: Segment, first: int = 0) -> None:
        """Locked. Count the blocks of a segment from an entry on."""
        numbers = np.array(segment.table.tenants[first:])
        held = np.bincount(numbers, segment.table.stored_bytes(slice(first, None)))
        for number in np.flatnonzero(held).tolist():
            held_bytes = int(held[number])
            self._tenant(number).held += held_bytes
            segment.held[number] = segment.held.get(number, 0) + held_bytes

    def release(self, segment: Segment) -> None:
        """Locked. Count the blocks of a segment no more."""
        for number, held_bytes in segment.held.items():
            self._tenant(number).held -= held_bytes
        segment.held = {}

    def adopt(self, segment: Segment) -> None:
        """Locked. Count the blocks of a recovered segment for the tenants that its summary names."""
        table = segment.table
        if missing := len(table) - len(table.tenants):
            table.tenants.extend([NOBODY] * missing)
        numbers = [NOBODY, *(self.number(name) if name else NOBODY for name in segment.tenant_names)]
        found = np.array(table.tenants)
        found[found >= len(numbers)] = NOBODY
        table.tenants[:] = array("H", np.array(numbers, np.uint16)[found].tobytes())
        segment.tenant_names = ()
        self.count(segment)

    def reset(self, segments: Sequence[Segment]) -> None:
        """Locked. Count from nothing, at a reset."""
        for segment in segments:
            segment.held = {}
        for tenant in (self._nobody, *self._tenants):
            tenant.held = 0

    def note_evicted(self, table: EntryTable, ordinals: Sequence[int]) -> None:
        """Locked. Count evicted blocks of a table."""
        counts = np.bincount(np.frombuffer(table.tenants, np.uint16)[ordinals])
        for number in np.flatnonzero(counts).tolist():
            self._tenant(number).evicted_blocks += int(counts[number])

    def _tenant(self, number: int) -> SegmentTenant:
        return self._tenants[number - 1] if number else self._nobody

    # The reclaimer's thread.

    def least(self, segments: Sequence[Segment], worth: Worth, changed: threading.Condition) -> Segment:
        """Return the segment to reclaim, whose `protected` is set: see above. `changed` is the pool's lock."""
        ages = self._ages_of(segments, worth)
        with changed:
            lost = self._losses(segments[0].segment_bytes)
        protected = [{} for _ in segments] if lost is None else self._protected(segments, ages, lost)
        parts = [sum(kept.values()) / each.segment_bytes for kept, each in zip(protected, segments, strict=True)]
        fit = {each for part, each in zip(parts, segments, strict=True) if part <= PROTECTED_SHARE_MAX}
        segment = self._first(fit or {segments[parts.index(min(parts))]}, segments, worth)
        kept = protected[segments.index(segment)]
        # If not all of it may move, that of tenants far below their shares does.
        segment.protected = {number: kept[number] for number in sorted(kept, key=self._part_held)}
        return segment

    def _part_held(self, number: int) -> float:
        tenant = self._tenant(number)
        return tenant.held / max(tenant.share, 1.0)

    def _first(self, fit: Set[Segment], segments: Sequence[Segment], worth: Worth) -> Segment:
        """Return the one of some segments whose loss costs least. A ranking of all serves as often as `Worth.least`."""
        chosen = next((each for each in self._ranked if each in fit), None) if self._serves else None
        if chosen is None:
            self._ranked, self._serves = worth.ranking(segments), -(-len(segments) // SEGMENTS_PER_RANKING)
            chosen = next(each for each in self._ranked if each in fit)
        self._serves -= 1
        self._ranked.remove(chosen)
        return chosen

    def _ages_of(self, segments: Sequence[Segment], worth: Worth) -> list[Mapping[int, float]]:
        """Return the mean age of each tenant's blocks in segments that nobody fills: the ticks since their last uses.

        They are counted once in a tick.
        """
        known, self._ages = self._ages, {}
        for segment in segments:
            use = segment.slot, segment.generation, worth.tick
            self._ages[use] = known[use] if use in known else _mean_ages(segment.table, worth)
        return list(self._ages.values())

    def _losses(self, wanted_bytes: int) -> dict[int, int] | None:
        """Locked. Return by number how many bytes each tenant loses if so many are freed.

        None if those that hold more than their shares have too little to lose: then no tenant's share counts.
        """
        lost: dict[int, int] = {}
        slack_bytes = int(SLACK_SHARE * wanted_bytes)

        def take(tenant: SegmentTenant, taken_bytes: int) -> int:
            lost[tenant.number] = lost.get(tenant.number, slack_bytes) + taken_bytes
            return taken_bytes

        self._shares.follow_limits()
        if self._nobody.held >= wanted_bytes:
            return lost
        missing_bytes = self._shares.evict(wanted_bytes, None, 0, take)
        return lost if missing_bytes <= PROTECTED_SHARE_MAX * wanted_bytes else None

    def _protected(
        self, segments: Sequence[Segment], ages: Sequence[Mapping[int, float]], lost: Mapping[int, int]
    ) -> list[dict[int, int]]:
        """Return how many bytes of each tenant have to stay in each segment, if it is reclaimed."""
        kept = [{**segment.held, NOBODY: 0} for segment in segments]
        for number, lost_bytes in lost.items():
            give_way()
            oldest_first = [at for at, held in enumerate(kept) if number in held]
            oldest_first.sort(key=lambda at: -ages[at].get(number, 0.0))
            old_bytes = OLD_SHARE * self._tenant(number).held
            for at in oldest_first:
                if old_bytes <= 0:
                    break
                old_bytes -= kept[at][number]
                kept[at][number] -= min(kept[at][number], lost_bytes)
        return kept


def protected_blocks(segment: Segment, worth: Worth) -> list[int]:
    """Return the blocks that make up the protected part of a segment: of each tenant the best ones."""
    if not any(segment.protected.values()):
        return []
    table, chosen = segment.table, list[int]()
    order, sizes = worth.best_first(table), table.stored_bytes(slice(None))
    tenants = np.array(table.tenants)[order]
    for number, kept_bytes in segment.protected.items():
        own = order[tenants == number]
        before_bytes = np.cumsum(sizes[own], dtype=np.int64) - sizes[own]
        chosen += own[before_bytes < kept_bytes].tolist()
    return chosen


def _mean_ages(table: EntryTable, worth: Worth) -> Mapping[int, float]:
    give_way()
    numbers, ages = np.array(table.tenants), worth.ages(table)
    counts, sums = np.bincount(numbers), np.bincount(numbers, ages)
    return {number: float(sums[number] / counts[number]) for number in np.flatnonzero(counts).tolist()}
