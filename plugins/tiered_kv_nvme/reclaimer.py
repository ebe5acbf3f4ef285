"""The reclaimer: one thread that frees segments and seals full ones, so that stores need not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tiered_kv.counters import Counters
from tiered_kv.tiering.step import give_way
from tiered_kv.toolkit.codecs import Draft
from tiered_kv_nvme.files import NoSegment, SegmentFiles
from tiered_kv_nvme.index import CHUNK_KEYS, PAUSE_S, place_of
from tiered_kv_nvme.pool import SegmentPool
from tiered_kv_nvme.reader import BlockReader, neighbours
from tiered_kv_nvme.segment import Segment, SegmentState
from tiered_kv_nvme.worth import READ, RELOCATED_SHARE_MAX
from tiered_kv_nvme.writer import BatchWriter, Payload

_RETRY_S = 0.1
_GROW_RETRY_S = 5.0
"""How often to check whether the capacity and the file system have room for one more segment."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reclaimer:
    """Keeps `pool.free_target` segments free: new ones up to the capacity, then those worth least."""

    files: SegmentFiles
    pool: SegmentPool
    counters: Counters
    reader: BlockReader
    writer: BatchWriter
    name: str  # the thread's

    def __post_init__(self) -> None:
        self._grow_after_s = 0.0
        self._excess_after_s = 0.0
        self._is_failing = False  # a segment could not be written again, and no other has been made since
        self._logged: set[type[Exception]] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current work; return whether it ended in time."""
        with self.pool.changed:
            self._stopping = True
            self.pool.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while not self._stopping:
            failed = False
            try:
                with self.pool.changed:
                    missing = self.pool.free_missing
                worked = (missing > 0 and self._make_room()) or self._seal()
            except Exception as error:  # without a reclaimer every later store would fail
                self._log(error)
                worked, failed = False, True
            if not worked:
                self._rest(failed)

    def _log(self, error: Exception) -> None:
        if type(error) not in self._logged:
            self._logged.add(type(error))
            _log.error("reclaiming failed; further errors of this kind are not logged", exc_info=error)

    def _rest(self, failed: bool) -> None:
        """Wait until there may be work, which may be now; after a failure, wait in any case."""
        with self.pool.changed:
            short = self.pool.free_missing > 0
            ready = self.pool.full() or (short and bool(self.pool.reclaimable()))
            if not self._stopping and (failed or self._is_failing or not ready):
                self.pool.changed.wait(_RETRY_S if short or failed else None)

    def _seal(self) -> bool:
        with self.pool.changed:
            segment = self.pool.full()
            void = segment is not None and segment.epoch != self.pool.epoch
        if segment is None:
            return False
        if not void:
            self.files.seal(segment)  # if it fails, recovery scans the batches
        with self.pool.changed:
            segment.state = SegmentState.SEALED
        return True

    def _make_room(self) -> bool:
        """Make one segment free, or try to; return whether that was possible."""
        self.pool.worth.advance()
        with self.pool.changed:
            segments = self.pool.reclaimable()
            void = bool(segments) and segments[0].epoch != self.pool.epoch
        if not void:
            if self._grow():
                return True
            if self._is_failing:
                return False  # no other segment loses its blocks for a disk that takes none
        return bool(segments) and self._reclaim(self.pool.worth.least(segments, lambda: time.sleep(PAUSE_S)))

    def _grow(self) -> bool:
        """Add a new segment, if the capacity and the file system have room for it."""
        if time.monotonic() < self._grow_after_s:
            return False
        with self.pool.changed:
            taken = frozenset(self.pool.segments)
            generation = self.pool.next_generation()
        segment = self.files.create(taken, generation)
        self._is_failing &= segment is NoSegment.FAILED
        with self.pool.changed:
            self.pool.note_growth(refused=segment in (NoSegment.NO_SPACE, NoSegment.AT_CAPACITY))
        if isinstance(segment, NoSegment):
            wait_s = _RETRY_S if segment is NoSegment.FAILED else _GROW_RETRY_S
            self._grow_after_s = time.monotonic() + wait_s
            return False
        with self.pool.changed:
            self.pool.adopt(segment)
        return True

    def _reclaim(self, segment: Segment) -> bool:
        """Use a segment again, or delete it; return False if it was put back.

        Reads may last too long, or the disk take no change. Then it is tried again before another loses its blocks.
        """
        with self.pool.changed:
            if segment.readers:
                return True  # changed since it was chosen; choose again
            segment.state = SegmentState.RECLAIMING
            epoch = self.pool.epoch
            can_relocate = segment.epoch == epoch and self.pool.can_relocate
        is_used_again = False
        try:
            if can_relocate:
                try:
                    self._relocate(segment, epoch)
                except Exception as error:  # its blocks are evicted: another attempt would fail, too
                    self._log(error)
            if self.pool.closed:
                return False  # the index is empty by now, so not all that is worth it has moved
            self._drop(segment)
            segment.epoch = 0  # it holds no valid block, as after a reset
            is_used_again = self._use_again(segment)
        finally:
            with self.pool.changed:
                if not is_used_again and segment.state is SegmentState.RECLAIMING:
                    if not self.pool.closed:
                        self.pool.changed.wait(_RETRY_S)
                    segment.state = SegmentState.SEALED
        return is_used_again

    def _relocate(self, segment: Segment, epoch: int) -> None:
        """Copy blocks that are worth it, up to `RELOCATED_SHARE_MAX` of the segment."""
        for ordinals in survivors(self.pool, segment):
            try:
                payloads = self.reader.read_stored(segment, ordinals)
            except OSError:
                self.counters.add("io_errors_total")
                continue
            found = zip(ordinals, payloads, strict=True)
            sound = [(ordinal, segment.table[ordinal], data) for ordinal, data in found if data is not None]
            moved, _ = self.writer.write(
                [segment.table.keys[ordinal] for ordinal, _, _ in sound],
                # What is stored already moves as it is, without a key.
                [Payload(Draft(entry.codec, 0, data), entry.checksum) for _, entry, data in sound],
                epoch,
                [place_of(segment.slot, ordinal) for ordinal, _, _ in sound],
            )
            self.counters.add("relocated_blocks_total", count=moved)
            if moved < len(sound):
                return

    def _drop(self, segment: Segment) -> None:
        table, drop = segment.table, self.pool.index.drop
        keys = table.keys
        for start in range(0, len(keys), CHUNK_KEYS):
            chunk = keys[start : start + CHUNK_KEYS]
            first_place = place_of(segment.slot, start)
            with self.pool.changed:
                dropped = [at for at, key in enumerate(chunk) if drop(key, first_place + at)]
                self.pool.events.removed([chunk[at] for at in dropped])
            self.counters.add("evicted_blocks_total", count=len(dropped))
            self.pool.worth.evicted([chunk[at] for at in dropped], [table.used[start + at] for at in dropped])
            unread = [start + at for at in dropped if not table.used[start + at] & READ]
            self.counters.add("wasted_bytes_total", count=sum(table.stored_bytes[ordinal] for ordinal in unread))
            time.sleep(PAUSE_S)

    def _use_again(self, segment: Segment) -> bool:
        """Free a segment without blocks, or delete it if it must not be used; return whether it is free.

        A segment whose size is not that of new ones is deleted: it may be too small for one block.
        """
        table = segment.table
        has_size = segment.segment_bytes == self.files.segment_bytes
        usable = has_size and not segment.damaged and not self._over_capacity()
        with self.pool.changed:
            if segment.readers:
                return False
            generation = self.pool.next_generation()
        if usable and not self.files.renew(segment, generation):
            if not self.files.unlink(segment.slot):
                return False  # such as on a read-only file system: its room cannot be had, so it is tried again
            usable, segment.damaged, self._is_failing = False, True, True
        with self.pool.changed:
            if usable:
                segment.renew(generation)
                self.pool.adopt(segment)
            else:
                self.pool.remove(segment)
                self.pool.note_growth(refused=False)
        self.counters.add("reclaimed_segments_total")
        if not usable:
            self.counters.add("damaged_segments_total", count=segment.damaged)
            self.files.delete(segment)
            self._grow_after_s = 0.0  # its space may be used
        while table.keys:
            del table.keys[-CHUNK_KEYS:]
            time.sleep(PAUSE_S)
        return True

    def _over_capacity(self) -> bool:
        """Return whether foreign files occupy the room of segments; checked every few seconds."""
        now_s = time.monotonic()
        if now_s < self._excess_after_s:
            return False
        try:
            excess_bytes = self.files.excess_bytes()
        except OSError:  # for example, too many open files: no reason to delete files
            self.counters.add("io_errors_total")
            return False
        if excess_bytes > 0:
            return True
        self._excess_after_s = now_s + _GROW_RETRY_S
        return False


def survivors(pool: SegmentPool, segment: Segment) -> Iterator[list[int]]:
    """Yield the ordinals of blocks that shall move when a segment is reclaimed, near neighbours together."""
    table, places = segment.table, pool.index.places
    budget_bytes = int(segment.segment_bytes * RELOCATED_SHARE_MAX)
    chosen: list[int] = []
    for count, ordinal in enumerate(pool.worth.movable(table), 1):
        if not count % CHUNK_KEYS:
            give_way()
        if places.get(table.keys[ordinal]) == place_of(segment.slot, ordinal):
            budget_bytes -= table.stored_bytes[ordinal]
            if budget_bytes < 0:
                break
            chosen.append(ordinal)
    yield from neighbours(table, sorted(chosen))
