"""The reclaimer: one thread that frees segments, seals full ones, and replaces deleted files.

The store starts it and stops it. A store that finds no free segment wakes it. These things stay true:

- It keeps `FREE_SEGMENTS` free while it can, and never exceeds the capacity.
- It reclaims no pinned segment. A block is moved, or it leaves the index, before its segment gets a new header.
- It moves at most a quarter of a segment, with shares at most half of a segment, which limits the extra writes.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import TieredKVError
from tiered_kv.system.file_systems import is_of_place
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.step import give_way
from tiered_kv.system.threads import start_thread
from tiered_kv.toolkit.small_files import has_name, told
from tiered_kv_nvme.disk import StoreCounters
from tiered_kv_nvme.index import place_of
from tiered_kv_nvme.layout import PAGE_BYTES, SegmentEntry
from tiered_kv_nvme.pool import CHUNK_KEYS, PAUSE_S, SegmentPool
from tiered_kv_nvme.probe import DiskProbe
from tiered_kv_nvme.reader import BlockReader, neighbours
from tiered_kv_nvme.segment import NoSegment, Segment, SegmentFiles, SegmentState, Unlinked
from tiered_kv_nvme.tenants import MOVED_SHARE_MAX, protected_blocks
from tiered_kv_nvme.worth import READ, RELOCATED_SHARE_MAX
from tiered_kv_nvme.writer import BatchWriter, Payloads

_RETRY_S = 0.1  # the pause after a failure, or while free segments are missing
_GROW_RETRY_S = 5.0  # how often to check whether the capacity and the file system have room for one more segment
_WATCH_S = 5.0  # how often to check whether somebody has deleted the directory, or files in it
_WATCH_PAUSE_S = 0.5  # the least time between two such checks, after a file could not be made

_FAILED_READS_MAX = 8
"""How many failed reads end a segment's relocation: a disk may take long for each, and stores wait meanwhile."""

_SPACE_AT_ONCE = 6
_SPACE_PAUSE_S = 60.0
"""The log takes `_SPACE_AT_ONCE` messages of a full disk at once, and then one in `_SPACE_PAUSE_S`."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reclaimer:
    """Keeps `FREE_SEGMENTS` segments free: adds segments up to the capacity, then reclaims the least valuable ones."""

    files: SegmentFiles
    pool: SegmentPool
    counters: StoreCounters
    reader: BlockReader
    writer: BatchWriter
    probe: DiskProbe
    remake: Callable[[], None]  # makes the directory and its small files again
    name: str  # the thread's

    def __post_init__(self) -> None:
        self._grow_after_s = 0.0  # no segment is added before, by `time.monotonic`
        self._grow_wait_s = _RETRY_S / 2  # doubled by each failure
        self._excess_after_s = 0.0  # the capacity is not checked before
        self._watched_s = time.monotonic()
        """When the reclaimer last looked for deleted files."""
        self._watch_after_s = self._watched_s + _WATCH_S
        self._is_failing = False  # a reclaimed segment's header could not be written, and no file was made since
        self._log_limit = LogLimit()
        self._full_since_s: float | None = None
        """Since when the log says that the disk is full; None if it does not say so."""
        self._space_limit = LogLimit(_SPACE_PAUSE_S, _SPACE_AT_ONCE)
        self._thread = start_thread(self._serve, self.name)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, which ends after its current work once the pool is closed; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while not self.pool.closed:
            failed = False
            try:
                self._watch()
                with self.pool.changed:
                    missing = self.pool.free_missing
                worked = (missing > 0 and self._make_room()) or self._seal()
            except BaseException as error:  # the thread goes on: if it ended, every later store would fail
                self._log(error)
                worked, failed = False, True
            if not worked:
                self._rest(failed)

    def _log(self, error: BaseException) -> None:
        if self._log_limit.take(type(error).__name__) is not None:
            _log.error("reclaiming failed; %s", self._log_limit.about, exc_info=error)

    def _rest(self, failed: bool) -> None:
        """Wait until there may be work; after a failure, wait in any case."""
        with self.pool.changed:
            short = self.pool.free_missing > 0
            ready = self.pool.next_to_seal() or (short and bool(self.pool.reclaimable()))
            if not self.pool.closed and (failed or self._is_failing or not ready):
                self.pool.changed.wait(_RETRY_S if short or failed else _WATCH_S)

    def _watch(self) -> None:
        """Make files again that another program has deleted, such as a cleaner of temporary files."""
        now_s = time.monotonic()
        if now_s < self._watch_after_s:
            return
        self._watched_s, self._watch_after_s = now_s, now_s + _WATCH_S
        folder = self.files.directory
        try:
            self.remake()
        except (OSError, TieredKVError) as error:
            if self._log_limit.take(f"remake {type(error).__name__}") is not None:
                _log.warning("%s: missing files cannot be made: %s", folder.path, told(error, folder.path))
            return
        with self.pool.changed:
            segments = [segment for segment in self.pool.segments.values() if not segment.deleted]
        deleted = [each for each in segments if not has_name(folder.segment_name(each.slot), each.fd, dir_fd=folder.fd)]
        if not deleted:
            return
        with self.pool.changed:
            free = self.pool.lose(deleted)
        for segment in free:
            os.close(segment.fd)
        self._grow_after_s = 0.0
        self.counters.add("lost_segments_total", count=len(deleted))
        about = "%d segment files in %s were deleted by another program, and are replaced"
        _log.warning(about, len(deleted), folder.path)

    def _seal(self) -> bool:
        with self.pool.changed:
            segment = self.pool.next_to_seal()
            void = segment is not None and segment.epoch != self.pool.epoch
        if segment is None:
            return False
        if not void:
            self.files.seal(segment, self.pool.tenant_names)  # if the seal fails, recovery scans the batches
        self.pool.note_sealed(segment)
        return True

    def _make_room(self) -> bool:
        """Try to free one segment; return whether something was done."""
        self.pool.worth.advance()
        with self.pool.changed:
            segments = self.pool.reclaimable()
            void = bool(segments) and segments[0].epoch != self.pool.epoch
        if not void and self._grow():
            return True
        if not segments:
            return False
        chosen = segments[0] if void else self.pool.least(segments)
        if self._is_failing and not self.probe.takes_writes(chosen):
            return False  # the disk takes no writes: do not evict the blocks of another segment
        return self._reclaim(chosen)

    def _grow(self) -> bool:
        """Add a new segment, if the capacity and the file system have room for it."""
        if time.monotonic() < self._grow_after_s:
            return False
        with self.pool.changed:
            taken = frozenset(self.pool.segments)
            generation, deleted_bytes = self.pool.next_generation(), self.pool.deleted_bytes
            self.pool.growing_since_s = time.monotonic()
        segment = self.files.create(taken, generation, deleted_bytes)
        self._is_failing &= segment is NoSegment.FAILED
        self._note_space(segment is NoSegment.NO_SPACE, isinstance(segment, NoSegment))
        with self.pool.changed:
            self.pool.note_growth(refused=segment in (NoSegment.NO_SPACE, NoSegment.AT_CAPACITY))
        if isinstance(segment, NoSegment):
            self._grow_wait_s = min(2 * self._grow_wait_s, _GROW_RETRY_S)
            wait_s = self._grow_wait_s if segment is NoSegment.FAILED else _GROW_RETRY_S
            self._grow_after_s = time.monotonic() + wait_s
            if segment is NoSegment.FAILED:  # the directory may be gone
                self._watch_after_s = min(self._watch_after_s, self._watched_s + _WATCH_PAUSE_S)
            return False
        self._grow_wait_s = _RETRY_S / 2
        with self.pool.changed:
            self.pool.adopt(segment)
        return True

    def _note_space(self, is_full: bool, is_refused: bool) -> None:
        """Log each time that the disk becomes full, and when it has space again, at a bounded rate."""
        now_s, place = time.monotonic(), self.files.directory.path
        if is_full and self._full_since_s is None and self._space_limit.take() is not None:
            self._full_since_s = now_s
            _log.warning("%s: the disk has no space for another segment; free it, or lower 'capacity'", place)
        elif not is_refused and self._full_since_s is not None:
            about = "%s: the disk has space for segments again, after %s"
            _log.warning(about, place, rounded_seconds(now_s - self._full_since_s))
            self._full_since_s = None

    def _reclaim(self, segment: Segment) -> bool:
        """Empty a segment and use it again or delete it; return False if neither succeeded.

        Unless the pool is closed, the segment then holds no block, and is the next to be reclaimed.
        """
        with self.pool.changed:
            if segment.readers:
                return True  # pinned since it was chosen; choose again
            segment.state = SegmentState.RECLAIMING
            epoch = self.pool.epoch
            can_relocate = segment.epoch == epoch and self.pool.can_relocate
        is_done = False
        try:
            if can_relocate:
                try:
                    self._relocate(segment, epoch)
                except Exception as error:  # evict the blocks: another attempt would fail too
                    self._log(error)
            if self.pool.closed:
                return False  # stores are refused meanwhile, so some blocks have not moved
            self._evict(segment)
            segment.epoch = 0  # no valid block, as after a reset
            self.pool.release(segment)
            is_done = self._use_again(segment)
        finally:
            with self.pool.changed:
                if not is_done and segment.state is SegmentState.RECLAIMING:
                    if not self.pool.closed:
                        self.pool.changed.wait(_RETRY_S)
                    segment.state = SegmentState.SEALED
        return is_done

    def _relocate(self, segment: Segment, epoch: int) -> None:
        waiting, failures = deque(survivors(self.pool, segment)), 0
        while waiting and failures < _FAILED_READS_MAX:
            ordinals = waiting.popleft()
            try:
                payloads = self.reader.read_stored(segment, ordinals)
            except OSError as error:
                self.counters.note_io_error("reading blocks", error)
                failures += 1
                if len(ordinals) > 1 and is_of_place(error) and self.probe.takes_reads(segment):
                    waiting.extendleft([ordinal] for ordinal in ordinals)  # each alone, to find the bad place
                continue
            keys: list[OffloadKey] = []
            moving: list[tuple[memoryview, SegmentEntry]] = []
            places: list[int] = []
            for ordinal, key, data in zip(ordinals, self.pool.index.keys_of(segment, ordinals), payloads, strict=True):
                if key is not None and data is not None:
                    keys.append(key)
                    moving.append((data, segment.table[ordinal]))
                    places.append(place_of(segment.slot, ordinal))
            moved, _ = self.writer.write(keys, _as_stored(moving), epoch, places)
            self.counters.add("relocated_blocks_total", count=moved)
            if moved < len(keys):
                return

    def _evict(self, segment: Segment) -> None:
        """Remove the blocks that are still in the segment from the index."""
        table = segment.table
        for start in range(0, len(table), CHUNK_KEYS):
            with self.pool.changed:
                if segment.epoch != self.pool.epoch:
                    return  # a reset has emptied it
                ordinals, keys = self.pool.index.evict(segment, range(start, min(start + CHUNK_KEYS, len(table))))
                self.pool.events.removed(keys)
                if self.pool.shares is not None:
                    self.pool.shares.note_evicted(table, ordinals)
            states = np.array(table.states)[ordinals]
            wasted = table.stored_bytes(ordinals)[states & READ == 0]
            self.counters.add("evicted_blocks_total", count=len(keys))
            self.counters.add("wasted_bytes_total", count=int(wasted.sum(dtype=np.int64)))
            self.pool.worth.remember_evicted(keys, states)
            time.sleep(PAUSE_S)

    def _use_again(self, segment: Segment) -> bool:
        """Free an empty segment; delete it if it is damaged, copied on write, of another size, or over the capacity.

        Returns False if reads are still in flight, or if the disk takes no change.
        """
        has_size = segment.segment_bytes == self.files.segment_bytes
        usable = has_size and not (segment.damaged or segment.is_copied) and not self._over_capacity()
        with self.pool.changed:
            if segment.readers:
                return False
            generation = self.pool.next_generation()
            segment.forget_refusal()
        if usable and not self.files.renew(segment, generation):
            if self.files.unlink(segment.slot) is Unlinked.FAILED:
                return False  # the file system is read-only, for example
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
            self.counters.add("damaged_segments_total", count=segment.damaged and not segment.deleted)
            self.files.delete(segment)
            self._grow_after_s = 0.0  # there is space for another
        return True

    def _over_capacity(self) -> bool:
        """Return whether foreign files take the space of segments; checked every few seconds."""
        now_s = time.monotonic()
        if now_s < self._excess_after_s:
            return False
        try:
            with self.pool.changed:
                deleted_bytes = self.pool.deleted_bytes
            excess_bytes = self.files.excess_bytes() + deleted_bytes
        except OSError as error:  # the process has too many open files, for example
            self.counters.note_io_error("listing the directory", error)
            return False
        if excess_bytes > 0:
            return True
        self._excess_after_s = now_s + _GROW_RETRY_S
        return False


def _as_stored(moving: Sequence[tuple[memoryview, SegmentEntry]]) -> Payloads:
    """Return payloads that move as they are stored, so encrypted ones need no key."""
    entries = [entry for _, entry in moving]
    sizes, codec_ids = [entry.stored_bytes for entry in entries], [entry.codec for entry in entries]
    return Payloads([data for data, _ in moving], sizes, codec_ids, [entry.checksum for entry in entries], ())


def survivors(pool: SegmentPool, segment: Segment) -> Iterator[list[int]]:
    """Yield the ordinals of the blocks to move when a segment is reclaimed, neighbours together.

    What moves from two segments fits into one, with its batches' headers: else no room would be gained.
    """
    table = segment.table
    room_bytes = segment.segment_bytes - PAGE_BYTES - table.table_bytes() - PAGE_BYTES
    moved_bytes_max = min(int(segment.segment_bytes * MOVED_SHARE_MAX), room_bytes // 2 - 2 * PAGE_BYTES)
    chosen = _within(pool, segment, protected_blocks(segment, pool.worth), moved_bytes_max)
    budget_bytes = min(int(segment.segment_bytes * RELOCATED_SHARE_MAX), moved_bytes_max)
    best = pool.worth.movable(table)
    if chosen:
        is_chosen = set(chosen)
        best = [ordinal for ordinal in best if ordinal not in is_chosen]
        budget_bytes -= int(table.stored_bytes(chosen).sum(dtype=np.int64))
    chosen += _within(pool, segment, best, budget_bytes)
    yield from neighbours(table, sorted(chosen, key=lambda ordinal: (table.span(ordinal)[0], ordinal)))


def _within(pool: SegmentPool, segment: Segment, best: Sequence[int], budget_bytes: int) -> list[int]:
    """Return the first of these blocks that are still in the index and fit into the budget."""
    table, chosen = segment.table, list[int]()
    for start in range(0, len(best), CHUNK_KEYS):
        if budget_bytes < 0:
            break
        give_way()
        ordinals = best[start : start + CHUNK_KEYS]
        for ordinal, key in zip(ordinals, pool.index.keys_of(segment, ordinals), strict=True):
            if key is not None and budget_bytes >= 0:
                budget_bytes -= table.span(ordinal)[1]
                chosen += [ordinal] * (budget_bytes >= 0)
    return chosen
