"""Loads: one vectored call reads neighbouring blocks, where possible straight into their rows.

A worker of the toolkit calls `BlockReader.load`; several workers may at once. These things stay true:

- Every block is verified before it is reported. A damaged block leaves the index, and is a miss.
- The blocks' segments are pinned during the read, so the reclaimer does not use them again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import UNREADABLE, Reason, RecordStatus
from tiered_kv.system.file_systems import is_of_place
from tiered_kv.system.step import give_way
from tiered_kv.toolkit.codecs import ENCRYPTED_IDS, RAW_ID, CodecSet, ThreadBuffer, binding_of
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.small_files import read_all
from tiered_kv_nvme.disk import DirectMemory, Disk, StoreCounters
from tiered_kv_nvme.index import ordinal_of, place_of, slot_of
from tiered_kv_nvme.layout import PAGE_BYTES, EntryTable, SegmentEntry, checksum, pages
from tiered_kv_nvme.pool import SegmentPool
from tiered_kv_nvme.probe import DiskProbe
from tiered_kv_nvme.segment import LEFT_OUT_S, Segment
from tiered_kv_nvme.worth import READ

RUN_BYTES_MAX = 8 << 20  # bytes of one read of a load
RUN_BLOCKS_MAX = 256  # blocks of one read
GAP_BYTES_MAX = 64 << 10
"""A longer gap between two requested blocks divides a read. A batch's header and a few blocks are shorter."""
SPAN_BYTES_MAX = 2 << 20  # bytes of one read to relocate or inspect blocks; a longer block is read alone


class Wanted(NamedTuple):
    """A block to read: its destination, and its place as of the pin."""

    key: OffloadKey
    block: memoryview
    segment: Segment
    table: EntryTable  # of the segment, as of the pin
    ordinal: int
    entry: SegmentEntry
    scatter: bool  # whether it can be read into its destination, and not only through a buffer

    def follows(self, run: Sequence[Wanted]) -> bool:
        """Return whether one call can read this block after `run`."""
        first = run[0]
        return (
            self.segment is first.segment
            and self.scatter is first.scatter
            and 0 <= self.entry.offset - _end(run[-1].entry) <= GAP_BYTES_MAX
            and len(run) < RUN_BLOCKS_MAX
            and not (self.segment.alone_until_s and time.monotonic() < self.segment.alone_until_s)
            and _end(self.entry) - first.entry.offset <= RUN_BYTES_MAX
        )


@dataclass(eq=False)
class BlockReader:
    """Reads blocks. Any thread may call, several at once."""

    disk: Disk
    pool: SegmentPool
    counters: StoreCounters
    block_bytes: int
    codecs: CodecSet
    memory: DirectMemory
    probe: DiskProbe

    def __post_init__(self) -> None:
        self._scratch = ThreadBuffer()
        self._may_scatter = self.block_bytes % PAGE_BYTES == 0 and self.codecs.accepts_plain

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], deadline: float = math.inf) -> Outcome:
        """Load blocks; return the keys that were loaded and verified, and why others were not.

        The `blocks` of the other keys have undefined content. After the deadline no read begins.
        """
        wanted, epoch = self._pin(keys, blocks)
        slots = {item.segment.slot for item in wanted}
        loaded: set[OffloadKey] = set()
        failed: set[OffloadKey] = set()  # a key that is requested twice is loaded only if both its blocks are
        lost: list[tuple[Wanted, RecordStatus]] = []
        reason = Reason.ABSENT if len(wanted) < len(keys) else None
        try:
            for run in _runs(wanted):
                if time.monotonic() >= deadline:
                    reason = Reason.EXPIRED
                    failed.update(item.key for item in run)
                    continue
                statuses: Sequence[RecordStatus | None]
                try:
                    statuses = self._read(run)
                except OSError as error:
                    self.counters.note_io_error("reading blocks", error)
                    statuses = self._read_one_by_one(run, error, deadline)
                for item, status in zip(run, statuses, strict=True):
                    if status is None:
                        failed.add(item.key)
                        reason = Reason.IO_ERROR
                    elif status is RecordStatus.OK:
                        self.pool.worth.use(item.table, item.ordinal, READ)
                        loaded.add(item.key)
                    else:
                        failed.add(item.key)
                        lost.append((item, status))
        finally:
            still_valid = self._unpin(slots, lost, epoch)
        if lost:
            status = lost[-1][1]
            reason = status.reason
        if not still_valid:
            return Outcome((), Reason.RESET)
        loaded -= failed
        return ALL_DONE if len(loaded) == len(set(keys)) else Outcome(loaded, reason)

    def read_stored(self, segment: Segment, ordinals: Sequence[int]) -> list[memoryview | None]:
        """Return the payloads of entries, which are sorted by offset; None for a corrupt one.

        The payloads are valid until this thread reads again. Raises `OSError`: the disk failed.
        """
        entries = [segment.table[ordinal] for ordinal in ordinals]
        payloads = read_payloads(self.disk, self._scratch, segment.fd, entries)
        return [data if _is_sound(data, entry) else None for entry, data in zip(entries, payloads, strict=True)]

    def _pin(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> tuple[list[Wanted], int]:
        """Pin the segments of the blocks in the index; return these blocks, and the epoch."""
        wanted: list[Wanted] = []
        pool, may_scatter = self.pool, self._may_scatter and self.memory.suits(blocks)
        with pool.changed:
            for key, block, place in zip(keys, blocks, pool.index.places.get_many(keys), strict=True):
                if place >= 0:
                    segment, ordinal = pool.segments[slot_of(place)], ordinal_of(place)
                    entry = segment.table[ordinal]
                    is_raw = entry.codec == RAW_ID and entry.stored_bytes == self.block_bytes
                    scatter = may_scatter and is_raw and entry.offset % PAGE_BYTES == 0
                    wanted.append(Wanted(key, block, segment, segment.table, ordinal, entry, scatter))
            pool.pin({item.segment.slot for item in wanted})
            return wanted, pool.epoch

    def _unpin(self, slots: set[int], lost: Sequence[tuple[Wanted, RecordStatus]], epoch: int) -> bool:
        """Unpin segments, remove lost blocks from the index, and return whether the epoch is still `epoch`."""
        dropped: list[RecordStatus] = []
        with self.pool.changed:
            for item, status in lost:
                if self.pool.index.drop(item.key, place_of(item.segment.slot, item.ordinal)):
                    dropped.append(status)
                    self.pool.hides_blocks |= status in UNREADABLE
                    self.pool.events.removed((item.key,))
            self.pool.unpin(slots)
            still_valid = self.pool.epoch == epoch
        for status in dropped:
            kind = "unreadable_blocks_total" if status in UNREADABLE else "corrupt_blocks_total"
            self.counters.add(kind, status.value)
        return still_valid

    def _read_one_by_one(self, run: Sequence[Wanted], error: OSError, deadline: float) -> Sequence[RecordStatus | None]:
        """Read the blocks of a run one by one, after the read of the run failed; None if a later read may succeed.

        A block is at a bad place if its own read fails, and then a read elsewhere succeeds. If that fails too, the disk
        is away, and no further block is read. If the time ends before all are read, later loads read each block alone.
        """
        statuses: list[RecordStatus | None] = []
        if len(run) == 1 and time.monotonic() >= deadline:  # the failed read was the block's own, and took long
            is_bad_place = is_of_place(error) and self.probe.takes_reads(run[0].segment)
            return [RecordStatus.BAD_PLACE if is_bad_place else None]
        while is_of_place(error) and len(statuses) < len(run) and time.monotonic() < deadline:
            item = run[len(statuses)]
            try:
                statuses += self._read([item])
            except OSError as again:
                error = again
                if not (is_of_place(error) and self.probe.takes_reads(item.segment)):
                    break
                statuses.append(RecordStatus.BAD_PLACE)
        if is_of_place(error) and len(statuses) < len(run) and time.monotonic() >= deadline:
            with self.pool.changed:
                run[0].segment.alone_until_s = time.monotonic() + LEFT_OUT_S
        return [*statuses, *[None] * (len(run) - len(statuses))]

    def _read(self, run: Sequence[Wanted]) -> list[RecordStatus]:
        if run[0].scatter:
            try:
                return self._read_scattered(run)
            except OSError as error:
                if not self.memory.is_refusal(error):
                    raise
        return self._read_buffered(run)

    def _read_scattered(self, run: Sequence[Wanted]) -> list[RecordStatus]:
        buffers: list[memoryview] = []
        start = at = run[0].entry.offset
        for item in run:
            if item.entry.offset > at:
                buffers.append(self._scratch.take(GAP_BYTES_MAX)[: item.entry.offset - at])
            buffers.append(item.block)
            at = _end(item.entry)
        came_bytes = read_all(run[0].segment.fd, buffers, start, preadv=self.disk.preadv)
        statuses: list[RecordStatus] = []
        for item in run:
            give_way()
            is_sound = _end(item.entry) - start <= came_bytes and checksum(item.block) == item.entry.checksum
            statuses.append(RecordStatus.OK if is_sound else RecordStatus.BAD_CHECKSUM)
        return statuses

    def _read_buffered(self, run: Sequence[Wanted]) -> list[RecordStatus]:
        entries = [item.entry for item in run]
        payloads = read_payloads(self.disk, self._scratch, run[0].segment.fd, entries)
        statuses: list[RecordStatus] = []
        for item, payload in zip(run, payloads, strict=True):
            give_way()
            statuses.append(decode_payload(item.entry, item.key, payload, item.block, self.pool.digest, self.codecs))
        return statuses


def _runs(wanted: list[Wanted]) -> list[list[Wanted]]:
    wanted.sort(key=lambda item: (item.segment.slot, item.entry.offset))
    runs: list[list[Wanted]] = []
    for item in wanted:
        if runs and item.follows(runs[-1]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def read_payloads(disk: Disk, scratch: ThreadBuffer, fd: int, entries: Sequence[SegmentEntry]) -> list[memoryview]:
    """Read neighbouring payloads, sorted by offset, in one call. A payload behind the end of the file is short."""
    start = entries[0].offset // PAGE_BYTES * PAGE_BYTES
    span = scratch.take(pages(max(map(_end, entries))) - start)
    span = span[: read_all(fd, [span], start, preadv=disk.preadv)]
    return [span[entry.offset - start : _end(entry) - start] for entry in entries]


def neighbours(table: EntryTable, ordinals: Iterable[int]) -> Iterator[list[int]]:
    """Divide entries, sorted by offset, into groups for one read each."""
    near: list[int] = []
    for ordinal in ordinals:
        offset, stored_bytes = table.span(ordinal)
        if not near:
            first_offset = offset
        elif offset + stored_bytes - first_offset > SPAN_BYTES_MAX or len(near) == RUN_BLOCKS_MAX:
            yield near
            near, first_offset = [], offset
        near.append(ordinal)
    if near:
        yield near


def decode_payload(
    entry: SegmentEntry,
    key: OffloadKey,
    payload: memoryview,
    block: memoryview,
    namespace_digest: bytes,
    codecs: CodecSet,
) -> RecordStatus:
    """Verify a stored payload and decode it into `block`.

    Decryption verifies the tag of an encrypted payload, which covers more than the checksum. If the tag is wrong, the
    checksum distinguishes damage from an attack.
    """
    if entry.codec not in ENCRYPTED_IDS and not _is_sound(payload, entry):
        return RecordStatus.BAD_CHECKSUM
    status = codecs.decode(entry.codec, payload, block, binding_of(namespace_digest, key))
    if entry.codec in ENCRYPTED_IDS and status is not RecordStatus.OK and not _is_sound(payload, entry):
        return RecordStatus.BAD_CHECKSUM
    return status


def _end(entry: SegmentEntry) -> int:
    return entry.offset + entry.stored_bytes


def _is_sound(payload: memoryview, entry: SegmentEntry) -> bool:
    return len(payload) == entry.stored_bytes and checksum(payload) == entry.checksum
