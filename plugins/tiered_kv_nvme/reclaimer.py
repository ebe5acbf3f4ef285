"""The reclaimer: one thread that keeps free segments ready and seals full ones, so that stores never do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.codecs import Draft
from tiered_kv_nvme.counters import Counters
from tiered_kv_nvme.disk import Scratch
from tiered_kv_nvme.epoch import DirectoryEpoch
from tiered_kv_nvme.files import NoSegment, SegmentFiles
from tiered_kv_nvme.index import Index, place_of
from tiered_kv_nvme.layout import Entry
from tiered_kv_nvme.pool import SegmentPool
from tiered_kv_nvme.reader import BlockReader
from tiered_kv_nvme.segment import Segment, SegmentState
from tiered_kv_nvme.writer import BATCH_BLOCKS_MAX, BatchWriter, Payload, Relocation

RELOCATED_SHARE_MAX = 0.25
"""Of a segment, how much may move on: it bounds what reclaiming adds to what stores write."""

_CHUNK_KEYS = 256
_PAUSE_S = 50e-6
"""Work on many keys is done in chunks with pauses between, so that the scheduler's thread never waits long for
the interpreter lock."""
_SPAN_BYTES_MAX = 2 << 20
"""What is read at once of a segment to relocate blocks of it, unless a block is larger."""
_RETRY_S = 0.1
_GROW_RETRY_S = 5.0
"""How often it is looked up whether the capacity and the file system have room for one segment more."""

_log = logging.getLogger(__name__)


class Reclaimer:
    """Keeps `pool.free_target` segments free: new ones up to the capacity, then the oldest one's room.

    Args:
        files, pool, index, counters, reader, writer, epoch: The store's.
        least_bytes: Size of a segment that holds one block; a smaller one, of a time when blocks were stored
            shorter, is deleted instead of used again.
        name: The thread's name.
    """

    def __init__(
        self,
        files: SegmentFiles,
        pool: SegmentPool,
        index: Index,
        counters: Counters,
        reader: BlockReader,
        writer: BatchWriter,
        epoch: DirectoryEpoch,
        *,
        least_bytes: int,
        name: str,
    ) -> None:
        self._files = files
        self._pool = pool
        self._index = index
        self._counters = counters
        self._reader = reader
        self._writer = writer
        self._epoch = epoch
        self._least_bytes = least_bytes
        self._buffer = Scratch()
        self._grow_after_s = 0.0
        self._excess_after_s = 0.0
        self._unrenewed: Segment | None = None
        self._unmovable: Segment | None = None
        self._forgotten: list[dict[OffloadKey, int]] = []
        self._logged: set[type[Exception]] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def forget(self, places: dict[OffloadKey, int]) -> None:
        """Locked. Take the index of a reset cache apart, and make the reset outlast a power failure."""
        self._forgotten.append(places)
        self._pool.changed.notify_all()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after what it is doing; return whether it ended in time."""
        with self._pool.changed:
            self._stopping = True
            self._pool.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while not self._stopping:
            failed = False
            try:
                worked = self._work()
            except Exception as error:  # a reclaimer that dies would fail every store from then on
                if type(error) not in self._logged:
                    self._logged.add(type(error))
                    _log.exception("reclaiming failed; further errors of this kind are not logged")
                worked, failed = False, True
            if not worked:
                self._rest(failed)

    def _work(self) -> bool:
        """Do what is most wanted; return whether anything could be done."""
        with self._pool.changed:
            forgotten = self._forgotten[0] if self._forgotten else None
            missing = self._pool.free_missing
        if forgotten is not None:
            self._epoch.sync()  # if it fails, it is tried again
            with self._pool.changed:
                self._forgotten.pop(0)
            _take_apart(forgotten)
            return True
        if missing > 0 and self._make_room():
            return True
        return self._seal()

    def _rest(self, failed: bool) -> None:
        """Wait until there may be something to do, which may be now; after a failure, wait in any case."""
        with self._pool.changed:
            short = self._pool.free_missing > 0
            ready = self._forgotten or self._pool.full() or (short and self._pool.oldest())
            if not self._stopping and (failed or not ready):
                self._pool.changed.wait(_RETRY_S if short or failed else None)

    def _seal(self) -> bool:
        with self._pool.changed:
            segment = self._pool.full()
            void = segment is not None and segment.epoch != self._pool.epoch
        if segment is None:
            return False
        if not void:
            self._files.seal(segment)  # if it fails, recovery scans the batches
        with self._pool.changed:
            segment.state = SegmentState.SEALED
        return True

    def _make_room(self) -> bool:
        """Make one segment free, or try to; return whether that was possible."""
        if self._unrenewed is not None:
            return self._use_again(self._unrenewed)
        with self._pool.changed:
            segment = self._pool.oldest()
            void = segment is not None and segment.epoch != self._pool.epoch
        if not void and self._grow():
            return True
        return segment is not None and self._reclaim(segment)

    def _grow(self) -> bool:
        """Add a new segment, if the capacity and the file system have room for it."""
        if time.monotonic() < self._grow_after_s:
            return False
        with self._pool.changed:
            taken = frozenset(self._pool.segments)
            generation = self._pool.next_generation()
        segment = self._files.create(taken, generation)
        with self._pool.changed:
            self._pool.note_growth(refused=segment in (NoSegment.NO_SPACE, NoSegment.AT_CAPACITY))
        if isinstance(segment, NoSegment):
            wait_s = _RETRY_S if segment is NoSegment.FAILED else _GROW_RETRY_S
            self._grow_after_s = time.monotonic() + wait_s
            return False
        with self._pool.changed:
            self._pool.adopt(segment)
        return True

    def _reclaim(self, segment: Segment) -> bool:
        """Use a segment again; return False if it cannot be written, or is read for so long that it was put back."""
        with self._pool.changed:
            if segment.readers:
                return True  # since it was chosen; choose again
            segment.state = SegmentState.RECLAIMING
            epoch = self._pool.epoch
            void = segment.epoch != epoch
            can_relocate = self._pool.can_relocate
        try:
            if not void and can_relocate and segment is not self._unmovable:
                self._unmovable = segment  # whose blocks are dropped the next time, if this raises
                self._relocate(segment, epoch)
            self._unmovable = None
            self._drop(segment)
            with self._pool.changed:
                if segment.readers:
                    self._pool.changed.wait(_RETRY_S)
                if segment.readers:
                    segment.state = SegmentState.SEALED
                    return False
            return self._use_again(segment)
        except BaseException:
            with self._pool.changed:  # or nobody would ever choose it again
                if segment.state is SegmentState.RECLAIMING:
                    segment.state = SegmentState.SEALED
            raise

    def _relocate(self, segment: Segment, epoch: int) -> None:
        """Copy blocks that were used since they were written, up to `RELOCATED_SHARE_MAX` of the segment."""
        budget_bytes = int(segment.segment_bytes * RELOCATED_SHARE_MAX)
        for ordinals in self._survivors(segment, budget_bytes):
            try:
                payloads = self._reader.read_stored(segment, ordinals, self._buffer)
            except OSError:
                self._counters.add("io_errors_total")
                return
            relocation = _relocation(segment, ordinals, payloads)
            moved = self._writer.relocate(relocation, epoch)
            self._counters.add("relocated_blocks_total", count=moved)
            if moved < len(relocation.keys):
                return

    def _survivors(self, segment: Segment, budget_bytes: int) -> Iterator[list[int]]:
        """Yield the ordinals of blocks that shall move, near neighbours together."""
        table, places = segment.table, self._index.places
        near: list[int] = []
        ordinal = table.used.find(1)
        while ordinal >= 0:
            place = place_of(segment.slot, ordinal)
            if places.get(table.keys[ordinal]) == place:
                budget_bytes -= table.stored_bytes[ordinal]
                if budget_bytes < 0:
                    break
                end_offset = table.offsets[ordinal] + table.stored_bytes[ordinal]
                if near and (end_offset - table.offsets[near[0]] > _SPAN_BYTES_MAX or len(near) == BATCH_BLOCKS_MAX):
                    yield near
                    near = []
                near.append(ordinal)
            ordinal = table.used.find(1, ordinal + 1)
        if near:
            yield near

    def _drop(self, segment: Segment) -> None:
        """Forget the blocks that are still in `segment`."""
        keys, drop = segment.table.keys, self._index.drop
        for start in range(0, len(keys), _CHUNK_KEYS):
            chunk = keys[start : start + _CHUNK_KEYS]
            first_place = place_of(segment.slot, start)
            with self._pool.changed:
                dropped = sum(drop(key, place) for place, key in enumerate(chunk, first_place))
            self._counters.add("evicted_blocks_total", count=dropped)
            time.sleep(_PAUSE_S)

    def _use_again(self, segment: Segment) -> bool:
        """Make a segment that nobody knows any more free, or delete it where it must not be used.

        Returns:
            False where its header could not be written. It is tried again before another segment loses its blocks:
            that one would fare no better.
        """
        table = segment.table
        fits = segment.segment_bytes >= self._least_bytes  # or it would be filled with nothing, again and again
        usable = fits and not segment.damaged and not self._over_capacity()
        with self._pool.changed:
            generation = self._pool.next_generation()
        if usable and not self._files.renew(segment, generation):
            self._unrenewed = segment
            with self._pool.changed:
                self._pool.changed.wait(_RETRY_S)
            return False
        self._unrenewed = None
        with self._pool.changed:
            if usable:
                segment.renew(generation)
                self._pool.adopt(segment)
            else:
                self._pool.remove(segment)
                self._pool.note_growth(refused=False)
        self._counters.add("reclaimed_segments_total")
        if not usable:
            self._files.delete(segment)
            self._grow_after_s = 0.0  # its space may be had
        while table.keys:
            del table.keys[-_CHUNK_KEYS:]
            time.sleep(_PAUSE_S)
        return True

    def _over_capacity(self) -> bool:
        """Return whether foreign files have grown into the room of segments; looked up every few seconds."""
        now_s = time.monotonic()
        if now_s < self._excess_after_s:
            return False
        try:
            excess_bytes = self._files.excess_bytes()
        except OSError:  # too many open files, say: no reason to delete anything
            self._counters.add("io_errors_total")
            return False
        if excess_bytes > 0:
            return True
        self._excess_after_s = now_s + _GROW_RETRY_S
        return False


def _relocation(segment: Segment, ordinals: Sequence[int], payloads: Sequence[memoryview | None]) -> Relocation:
    """Return the move of those blocks of `segment` whose payloads are sound."""
    sound = [(ordinal, data) for ordinal, data in zip(ordinals, payloads, strict=True) if data is not None]
    entries = [segment.table[ordinal] for ordinal, _ in sound]
    return Relocation(
        [segment.table.keys[ordinal] for ordinal, _ in sound],
        [Payload(_stored(entry, data), entry.checksum) for entry, (_, data) in zip(entries, sound, strict=True)],
        [place_of(segment.slot, ordinal) for ordinal, _ in sound],
    )


def _stored(entry: Entry, data: memoryview) -> Draft:
    """Return the draft of what is stored already: it moves as it is, without a key."""
    return Draft(entry.codec, 0, 0, len(data), data, None)


def _take_apart(places: dict[OffloadKey, int]) -> None:
    while places:
        for _ in range(min(_CHUNK_KEYS, len(places))):
            places.popitem()
        time.sleep(_PAUSE_S)
