"""Loads: one vectored call reads neighbouring places on the disk, and every block is verified."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.counters import Counters
from tiered_kv.tiering.step import give_way
from tiered_kv.toolkit.codecs import ENCRYPTED_IDS, RAW_ID, CodecSet, binding_of
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.status import REFUSED, UNREADABLE, RecordStatus
from tiered_kv_nvme.disk import Disk, Scratch, is_of_alignment, read_fully
from tiered_kv_nvme.index import ordinal_of, place_of, slot_of
from tiered_kv_nvme.layout import PAGE_BYTES, Entry, EntryTable, checksum, pages
from tiered_kv_nvme.pool import SegmentPool
from tiered_kv_nvme.segment import Segment
from tiered_kv_nvme.worth import READ

RUN_BYTES_MAX = 8 << 20
RUN_BLOCKS_MAX = 256
GAP_BYTES_MAX = 64 << 10
"""The longest gap between two requested blocks that is read too: a header, or a few blocks."""
SPAN_BYTES_MAX = 2 << 20
"""Bytes of one read to relocate or inspect blocks, unless a block is larger."""


class Wanted(NamedTuple):
    """A block to read: its destination, and its index entry when its segment was pinned."""

    key: OffloadKey
    block: memoryview
    segment: Segment
    ordinal: int
    entry: Entry


@dataclass(slots=True)
class Run:
    """Blocks of one segment, one at first, that one call reads, in the order they lie on the disk."""

    blocks: list[Wanted]
    scatter: bool  # whether each is read straight to its destination; otherwise through a buffer

    @property
    def offset(self) -> int:
        """Where the run begins."""
        return self.blocks[0].entry.offset

    @property
    def end_offset(self) -> int:
        """Where it ends."""
        return _end(self.blocks[-1].entry)

    def takes(self, wanted: Wanted, scatter: bool) -> bool:
        """Add a block after the run, if it is near enough; return whether it was added."""
        gap_bytes = wanted.entry.offset - self.end_offset
        if (
            wanted.segment is not self.blocks[0].segment
            or scatter is not self.scatter
            or not 0 <= gap_bytes <= GAP_BYTES_MAX
            or len(self.blocks) >= RUN_BLOCKS_MAX
            or _end(wanted.entry) - self.offset > RUN_BYTES_MAX
        ):
            return False
        self.blocks.append(wanted)
        return True


@dataclass(eq=False)
class BlockReader:
    """Reads blocks; every method may be called by several threads at once."""

    disk: Disk
    pool: SegmentPool
    counters: Counters
    block_bytes: int
    codecs: CodecSet
    scatter: bool  # whether blocks may be read straight into the caller's memory, as `gather` of `BatchWriter`

    def __post_init__(self) -> None:
        self._scratch = Scratch()

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], deadline: float) -> Outcome:
        """Return which keys were loaded and verified, and why others were not, whose `blocks` are undefined then.

        After the deadline no read begins.
        """
        wanted, epoch = self._pin(keys, blocks)
        slots = {item.segment.slot for item in wanted}
        loaded: set[OffloadKey] = set()
        failed: set[OffloadKey] = set()  # a key that is asked for twice is loaded if both its blocks are
        lost: list[tuple[Wanted, RecordStatus]] = []
        reason = "absent" if len(wanted) < len(keys) else ""
        try:
            for run in self._runs(wanted):
                if time.monotonic() >= deadline:
                    reason = "expired"
                    failed.update(item.key for item in run.blocks)
                    continue
                try:
                    statuses = self._read(run)
                except OSError as error:
                    self.counters.add("io_errors_total")
                    with self.pool.changed:
                        run.blocks[0].segment.damaged |= error.errno != errno.ENOMEM  # which is no fault of the disk
                    reason = "io_error"
                    failed.update(item.key for item in run.blocks)
                    continue
                for item, status in zip(run.blocks, statuses, strict=True):
                    if status is RecordStatus.OK:
                        self.pool.worth.use(item.segment.table, item.ordinal, READ)
                        loaded.add(item.key)
                    else:
                        failed.add(item.key)
                        lost.append((item, status))
        finally:
            still_valid = self._unpin(slots, lost, epoch)
        if lost:
            status = lost[-1][1]
            reason = str(status.value) if status in REFUSED else "checksum"
        if not still_valid:
            return Outcome((), "reset")
        loaded -= failed
        return ALL_DONE if len(loaded) == len(set(keys)) else Outcome(loaded, reason)

    def read_stored(self, segment: Segment, ordinals: Sequence[int]) -> list[memoryview | None]:
        """Return the stored bytes of some entries of one segment, until this thread reads again; None for corrupt ones.

        Raises:
            OSError: The disk failed.
        """
        entries = [segment.table[ordinal] for ordinal in ordinals]
        start = min(entry.offset for entry in entries) // PAGE_BYTES * PAGE_BYTES
        end = pages(max(map(_end, entries)))
        span = self._scratch.take(end - start)
        came = read_fully(self.disk, segment.fd, [span], start)
        payloads = [_payload(span[:came], entry, start) for entry in entries]
        return [data if _is_sound(data, entry) else None for entry, data in zip(entries, payloads, strict=True)]

    def _pin(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> tuple[list[Wanted], int]:
        """Pin the segments of the existing blocks; return the places of these blocks, and the epoch."""
        wanted: list[Wanted] = []
        pool = self.pool
        with pool.changed:
            places = self.pool.index.places
            for key, block in zip(keys, blocks, strict=True):
                place = places.get(key)
                if place is not None:
                    segment, ordinal = pool.segments[slot_of(place)], ordinal_of(place)
                    wanted.append(Wanted(key, block, segment, ordinal, segment.table[ordinal]))
            pool.pin({item.segment.slot for item in wanted})
            return wanted, pool.epoch

    def _unpin(self, slots: set[int], lost: Sequence[tuple[Wanted, RecordStatus]], epoch: int) -> bool:
        """Unpin the segments, remove lost blocks from the index, and return whether there was no reset meanwhile."""
        dropped: list[RecordStatus] = []
        with self.pool.changed:
            for item, status in lost:
                if self.pool.index.drop(item.key, place_of(item.segment.slot, item.ordinal)):
                    dropped.append(status)
                    self.pool.events.removed((item.key,))
            self.pool.unpin(slots)
            still_valid = self.pool.epoch == epoch
        for status in dropped:
            kind = "unreadable_blocks_total" if status in UNREADABLE else "corrupt_blocks_total"
            self.counters.add(kind, status.value)
        return still_valid

    def _runs(self, wanted: list[Wanted]) -> list[Run]:
        wanted.sort(key=lambda item: (item.segment.slot, item.entry.offset))
        runs: list[Run] = []
        for item in wanted:
            scatter = self._can_scatter(item.entry)
            if not runs or not runs[-1].takes(item, scatter):
                runs.append(Run([item], scatter))
        return runs

    def _can_scatter(self, entry: Entry) -> bool:
        raw = entry.codec == RAW_ID and entry.stored_bytes == self.block_bytes
        return self.scatter and raw and entry.offset % PAGE_BYTES == 0 and self.codecs.accepts_plain

    def _read(self, run: Run) -> list[RecordStatus]:
        if run.scatter:
            try:
                return self._read_scattered(run)
            except OSError as error:
                if not is_of_alignment(error):
                    raise
        return self._read_buffered(run)

    def _read_scattered(self, run: Run) -> list[RecordStatus]:
        buffers: list[memoryview] = []
        at = run.offset
        for item in run.blocks:
            if item.entry.offset > at:
                buffers.append(self._scratch.take(GAP_BYTES_MAX)[: item.entry.offset - at])
            buffers.append(item.block)
            at = _end(item.entry)
        came = read_fully(self.disk, run.blocks[0].segment.fd, buffers, run.offset)
        statuses: list[RecordStatus] = []
        for item in run.blocks:
            give_way()
            is_sound = _end(item.entry) - run.offset <= came and checksum(item.block) == item.entry.checksum
            statuses.append(RecordStatus.OK if is_sound else RecordStatus.BAD_CHECKSUM)
        return statuses

    def _read_buffered(self, run: Run) -> list[RecordStatus]:
        start = run.offset // PAGE_BYTES * PAGE_BYTES
        span = self._scratch.take(pages(run.end_offset) - start)
        came = read_fully(self.disk, run.blocks[0].segment.fd, [span], start)
        statuses: list[RecordStatus] = []
        for item in run.blocks:
            payload = _payload(span[:came], item.entry, start)
            give_way()
            statuses.append(decode_payload(item.entry, item.key, payload, item.block, self.pool.digest, self.codecs))
        return statuses


def neighbours(table: EntryTable, ordinals: Iterable[int]) -> Iterator[list[int]]:
    """Yield entries, given in the order in which they lie on the disk, in groups that are read at once."""
    near: list[int] = []
    for ordinal in ordinals:
        end_offset = table.offsets[ordinal] + table.stored_bytes[ordinal]
        if near and (end_offset - table.offsets[near[0]] > SPAN_BYTES_MAX or len(near) == RUN_BLOCKS_MAX):
            yield near
            near = []
        near.append(ordinal)
    if near:
        yield near


def decode_payload(
    entry: Entry, key: OffloadKey, payload: memoryview, block: memoryview, namespace_digest: bytes, codecs: CodecSet
) -> RecordStatus:
    """Verify a stored payload and put its block into place.

    The tag of an encrypted payload covers more than the checksum, and decryption verifies it. The checksum is
    verified only if the tag is wrong, to find the reason: damage, or an attack.
    """
    if entry.codec not in ENCRYPTED_IDS and not _is_sound(payload, entry):
        return RecordStatus.BAD_CHECKSUM
    status = codecs.decode(entry.codec, payload, block, binding_of(namespace_digest, key))
    if entry.codec in ENCRYPTED_IDS and status is not RecordStatus.OK and not _is_sound(payload, entry):
        return RecordStatus.BAD_CHECKSUM
    return status


def _end(entry: Entry) -> int:
    return entry.offset + entry.stored_bytes


def _payload(span: memoryview, entry: Entry, start: int) -> memoryview:
    at = entry.offset - start
    return span[at : at + entry.stored_bytes]


def _is_sound(payload: memoryview, entry: Entry) -> bool:
    return len(payload) == entry.stored_bytes and checksum(payload) == entry.checksum
