"""The segment pool: reservations for writers, pins for readers, and the order of reclaiming.

Writers, readers, the reclaimer and recovery call it on their own threads, and the scheduler's thread reads the index.
These things stay true:

- One condition, `SegmentPool.changed`, guards the segments and the index. A thread holds it for microseconds, never
  across I/O. The caller of a method whose docstring begins with "Locked" holds it. A read of the index needs no lock.
- The index names a block only after its bytes have been written.
- A pinned segment is not used again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import DEFAULT_TENANT
from tiered_kv.reasons import Reason
from tiered_kv.toolkit.event_log import EventLog
from tiered_kv_nvme.index import BlockIndex, ordinal_of, place_of, slot_of
from tiered_kv_nvme.layout import TENANT_NUMBER_BYTES, BatchHeader, EntryTable, batch_header_bytes
from tiered_kv_nvme.segment import LEFT_OUT_S, Demand, Segment, SegmentState
from tiered_kv_nvme.tenants import SegmentShares
from tiered_kv_nvme.worth import READ, Worth

LEFT_OUT_S_MIN = 5.0
"""Replaces `LEFT_OUT_S` if no other segment can be reclaimed."""
FREE_SEGMENTS = 2  # free segments that the reclaimer keeps: one for stores, one for relocations
_SEGMENTS_TO_RELOCATE = 3  # relocation needs one to reclaim, one for the moved blocks, one for stores


CHUNK_KEYS = 256
PAUSE_S = 50e-6
"""Work on many keys is done in chunks with pauses, so that the scheduler's thread waits little for the interpreter
lock."""


class WriteStream(Enum):
    """A kind of writer. Each has a segment, so that stores cannot take the space of relocated blocks."""

    STORES = "stores"
    RELOCATIONS = "relocations"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Space for one batch; `header` has its offset and its number of blocks. End it by `commit` or `abandon`.

    Until then, the segment is neither sealed nor reclaimed.
    """

    segment: Segment
    header: BatchHeader
    key_bytes: int  # of the batch's keys


class SegmentPool:
    """All segments of a directory, with the index of their blocks."""

    def __init__(
        self,
        digest: bytes,
        epoch: int,
        worth: Worth,
        *,
        shares: SegmentShares | None = None,
        wants_events: bool = False,
    ) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.digest = digest
        self.epoch = epoch
        self.closed = False  # whether reservations are refused for good
        self.segments: dict[int, Segment] = {}  # by slot
        self.index = BlockIndex()
        self.hides_blocks = False
        """Whether the index lacks blocks that this process cannot read, and others can: another has their key."""
        self.worth = worth
        self.shares = shares
        self.events = EventLog(wants_events)  # additions to and removals from the index
        self._generation = 0  # the greatest so far
        self.growing_since_s: float | None = None  # when a running allocation of a segment began
        self._growth_refused = False  # whether the disk or the capacity had no room for another segment
        self.refusal: Reason | None = None  # why the disk refused the last batch whose segment is left out
        self._ages = itertools.count()  # numbers segments as they become full
        self._free: deque[Segment] = deque()
        self._active: dict[WriteStream, Segment] = {}  # the segment that each stream fills

    # For writers.

    def reserve(self, demand: Demand, epoch: int, timeout_s: float, stream: WriteStream) -> Reservation | None:
        """Reserve space for as many blocks of `demand` as the stream's active segment can hold, at least one.

        Waits at most `timeout_s` for a free segment. Returns None if none became or can become free in time, if the
        cache was reset since `epoch`, or if the pool is closed.
        """
        deadline = time.monotonic() + timeout_s
        spare = int(stream is WriteStream.STORES)  # stores leave one free segment to relocations
        with self.changed:
            while not self.closed and epoch == self.epoch:
                active = self._active.get(stream)
                if active is not None:
                    count = active.fit(demand)
                    if count:
                        return self._take(active, demand, count)
                    self._retire(stream)
                if len(self._free) > spare:
                    segment = self._active[stream] = self._free.popleft()
                    segment.state, segment.epoch = SegmentState.ACTIVE, self.epoch
                    if stream is WriteStream.STORES:
                        self.worth.filled += 1
                    self.changed.notify_all()  # the reclaimer has a segment to free
                    continue
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or self.is_starved or not self.changed.wait(remaining_s):
                    return None
        return None

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[OffloadKey],
        entries: bytes,
        states: Sequence[int],
        old_places: Sequence[int] | None,
        tenant: str = DEFAULT_TENANT,
    ) -> bool:
        """End a reservation after its batch was written, and add its blocks to the index.

        `encode_entries` gives `entries`. Relocated blocks are added only if they are still at `old_places`. With
        shares, they go on counting for their tenants, and others count for `tenant`. Returns False after a reset or
        `close`.
        """
        segment = reservation.segment
        with self.changed:
            self._end_write(segment)
            if reservation.header.epoch != self.epoch or self.closed:
                return False
            first = len(segment.table)
            first_place = place_of(segment.slot, first)
            if self.shares is None:
                segment.table.append(keys, entries, states)
            else:
                number = self.shares.number(tenant)
                numbers = [number] * len(keys) if old_places is None else self._tenants_of(old_places)
                segment.table.append(keys, entries, states, numbers)
                self.shares.count(segment, first)
            if old_places is None:
                self.index.add(keys, first_place)
                self.events.stored(keys)
                return True
            self.index.move(keys, first_place, old_places)
        return True

    def abandon(self, reservation: Reservation) -> None:
        """Locked. End a reservation after an incomplete write of its batch.

        If no later reservation follows, its space is used again. Otherwise it is a hole, which ends a scan by batches.
        So no batch is added to the segment any more, and its summary lists the batches after the hole.
        """
        segment, header = reservation.segment, reservation.header
        if segment.end_offset == header.offset + header.batch_bytes:
            segment.end_offset = header.offset
            segment.sequence = header.sequence
            segment.reserved_blocks -= header.entry_count
            segment.key_bytes -= reservation.key_bytes
        elif segment.state is SegmentState.ACTIVE:
            self._retire(next(stream for stream, active in self._active.items() if active is segment))
        self._end_write(segment)

    def leave_out(self, reservation: Reservation, reason: Reason, *, is_noted: bool) -> None:
        """Locked. End a reservation: its place on the disk refused its batch, while other places take writes.

        The segment becomes full, and its blocks can be loaded. If `is_noted`, its later uses end before that place too.
        """
        segment, offset = reservation.segment, reservation.header.offset
        if segment.state is SegmentState.ACTIVE:
            self._retire(next(stream for stream, active in self._active.items() if active is segment))
        if is_noted:
            segment.refused_offset = min(segment.refused_offset or offset, offset)
            segment.refused_s = time.monotonic()
            self.refusal = reason
        self._end_write(segment)

    def _take(self, segment: Segment, demand: Demand, count: int) -> Reservation:
        key_bytes = demand.key_ends[count - 1]
        header = BatchHeader(
            batch_header_bytes(count, key_bytes),
            count,
            self.digest,
            segment.generation,
            segment.epoch,
            segment.sequence,
            segment.end_offset,
            demand.batch_bytes(count),
        )
        segment.end_offset += header.batch_bytes
        segment.sequence += 1
        segment.reserved_blocks += count
        segment.key_bytes += key_bytes
        segment.writers += 1
        return Reservation(segment, header, key_bytes)

    def _retire(self, stream: WriteStream) -> None:
        segment = self._active.pop(stream)
        segment.state = SegmentState.FULL
        segment.age = next(self._ages)
        self.changed.notify_all()

    def _end_write(self, segment: Segment) -> None:
        segment.writers -= 1
        if not segment.writers and segment.state is not SegmentState.ACTIVE:
            self.changed.notify_all()

    # For readers.

    def pin(self, slots: Iterable[int]) -> None:
        """Locked. Keep segments from being used again while they are read."""
        for slot in slots:
            self.segments[slot].readers += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Locked. Undo `pin`."""
        for slot in slots:
            segment = self.segments[slot]
            segment.readers -= 1
            if not segment.readers and segment.state is SegmentState.RECLAIMING:
                self.changed.notify_all()

    # For recovery and the reclaimer.

    def moved_states(self, places: Iterable[int]) -> list[int]:
        """Return the states of blocks that move. Their segment is being reclaimed, so no lock is needed."""
        return [self.segments[slot_of(place)].table.states[ordinal_of(place)] & ~READ for place in places]

    def _tenants_of(self, places: Iterable[int]) -> list[int]:
        return [self.segments[slot_of(place)].table.tenants[ordinal_of(place)] for place in places]

    def adopt(self, segment: Segment) -> None:
        """Locked. Add a segment; call for the oldest first."""
        assert segment.slot not in self.segments or self.segments[segment.slot] is segment
        self.segments[segment.slot] = segment
        segment.age = next(self._ages)
        self._generation = max(self._generation, segment.generation)
        if self.shares is not None:
            segment.entry_more_bytes = TENANT_NUMBER_BYTES
        if segment.state is SegmentState.FREE:
            self._free.append(segment)
            self.changed.notify_all()

    def resume(self, segment: Segment) -> None:
        """Locked. Let stores continue to fill a recovered segment."""
        segment.state = SegmentState.ACTIVE
        self._active[WriteStream.STORES] = segment

    def remove(self, segment: Segment) -> None:
        """Locked. Remove a segment, before its file is deleted."""
        assert not segment.readers
        assert not segment.writers
        del self.segments[segment.slot]
        if not self.can_relocate and WriteStream.RELOCATIONS in self._active:
            self._retire(WriteStream.RELOCATIONS)  # otherwise none would be left for stores

    def lose(self, segments: Iterable[Segment]) -> list[Segment]:
        """Locked. Note that the files of segments were deleted; return the free ones, which leave the pool.

        The other segments can still be read. No store fills them, and they are the next to be reclaimed.
        """
        free: list[Segment] = []
        for segment in segments:
            segment.damaged = segment.deleted = True
            if segment.state is SegmentState.FREE:
                self._free.remove(segment)
                free.append(segment)
                self.remove(segment)
            elif segment.state is SegmentState.ACTIVE:
                self._retire(next(stream for stream, active in self._active.items() if active is segment))
        self.note_growth(refused=False)
        return free

    @property
    def deleted_bytes(self) -> int:
        """Locked. Space of deleted files that are still open: no listing of the directory shows it."""
        return sum(segment.segment_bytes for segment in self.segments.values() if segment.deleted)

    def note_growth(self, *, refused: bool) -> None:
        """Locked. Note whether the disk or the capacity has no room for another segment. An allocation has ended."""
        self.growing_since_s = None
        self._growth_refused = refused
        self.changed.notify_all()

    @property
    def is_starved(self) -> bool:
        """Locked. Whether no segment can become free: none can be added, and none reclaimed."""
        return self._growth_refused and all(
            segment.state in (SegmentState.FREE, SegmentState.ACTIVE) or not segment.may_hold(LEFT_OUT_S)
            for segment in self.segments.values()
        )

    @property
    def left_out(self) -> int:
        """Locked. How many segments are not filled, or only in part, because a place on the disk refused a write."""
        return sum(segment.refused_offset > 0 for segment in self.segments.values())

    @property
    def can_relocate(self) -> bool:
        """Locked. Whether there are enough segments to give relocations one."""
        return len(self.segments) >= _SEGMENTS_TO_RELOCATE

    def next_generation(self) -> int:
        """Locked. Return a generation greater than all before."""
        self._generation += 1
        return self._generation

    @property
    def free_missing(self) -> int:
        """Locked. How many free segments are missing."""
        return FREE_SEGMENTS - len(self._free)

    def note_sealed(self, segment: Segment) -> None:
        """Note that a full segment has its summary. Then only the index has its keys. The reclaimer's thread."""
        places, hashes = self.index.places, self.index.hashes_of(segment)
        with self.changed:
            segment.state = SegmentState.SEALED
            if hashes is not None and places is self.index.places:  # there was no reset
                segment.table.forget_keys(hashes)

    def next_to_seal(self) -> Segment | None:
        """Locked. Return the oldest full segment without writes in flight."""
        full = [s for s in self.segments.values() if s.state is SegmentState.FULL and not s.writers]
        return min(full, key=lambda segment: segment.age, default=None)

    def reclaimable(self) -> list[Segment]:
        """Locked. Return the segments that may be reclaimed now, the oldest first.

        If some segments hold no valid block, only these are returned; otherwise, if some are damaged, only the damaged
        ones. A segment that refused a write lately is returned only if no other is left, a short one after a time.
        """
        idle = [
            segment
            for segment in self.segments.values()
            if segment.state in (SegmentState.FULL, SegmentState.SEALED) and not (segment.writers or segment.readers)
        ]
        idle.sort(key=lambda segment: segment.age)
        idle = (
            [segment for segment in idle if not segment.is_left_out]
            or [segment for segment in idle if segment.may_hold(LEFT_OUT_S)]
            or [segment for segment in idle if segment.may_hold(LEFT_OUT_S_MIN)]
        )
        void = [segment for segment in idle if segment.epoch != self.epoch]
        return void or [segment for segment in idle if segment.damaged] or idle

    @property
    def tenant_names(self) -> Sequence[str]:
        """The names of tenants by their numbers in tables; empty without shares."""
        return () if self.shares is None else self.shares.names

    def least(self, segments: Sequence[Segment]) -> Segment:
        """Return the segment to reclaim: the one whose loss costs least, of those that tenants' shares allow."""
        if self.shares is None:
            return self.worth.least(segments)
        return self.shares.least(segments, self.worth, self.changed)

    def release(self, segment: Segment) -> None:
        """Count the blocks of an emptied segment for no tenant any more."""
        if self.shares is not None:
            with self.changed:
                self.shares.release(segment)

    def reset(self, epoch: int) -> None:
        """Locked. Begin a new epoch, in which no segment holds a valid block."""
        self.epoch = epoch
        if self.shares is not None:
            self.shares.reset(list(self.segments.values()))
        self._retire_all()

    def take_void_table(self, segment: Segment) -> EntryTable | None:
        """Locked. Take the entries of a segment that is from before a reset; None if nothing is to be taken.

        The caller gives the memory back, without the lock.
        """
        if segment.epoch == self.epoch or segment.state not in (SegmentState.FULL, SegmentState.SEALED):
            return None
        table, segment.table = segment.table, EntryTable()
        return table

    def close(self) -> None:
        """Locked. Refuse further reservations; active segments become full."""
        self.closed = True
        self._retire_all()

    def _retire_all(self) -> None:
        for stream in tuple(self._active):
            self._retire(stream)
        self.changed.notify_all()
