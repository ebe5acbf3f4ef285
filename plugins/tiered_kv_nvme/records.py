"""The blocks of a directory as records, for a copy to another storage, while a stack may use the directory.

`NvmeAdministration` calls it, on one thread, for each call with the present state of the directory; some threads of
its own read. A segment may be
reclaimed and filled again at any time. So a payload is taken only if it has the checksum of its entry, and one that has
not is damaged only if the segment is still in the same use. What must stay true: no block from before a reset is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.system.permissions import check_file
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.administration import StoredBlock
from tiered_kv.toolkit.codecs import CODEC_IDS, ThreadBuffer, payload_bytes_range
from tiered_kv.toolkit.record import HEADER_BYTES, write_header
from tiered_kv.toolkit.small_files import opened, read_all
from tiered_kv_nvme.directory import segment_name
from tiered_kv_nvme.disk import Disk, address_of
from tiered_kv_nvme.inspection import Inspection
from tiered_kv_nvme.layout import PAGE_BYTES, EntryTable, SegmentEntry, SegmentHeader, checksum
from tiered_kv_nvme.reader import GAP_BYTES_MAX, RUN_BLOCKS_MAX, SPAN_BYTES_MAX
from tiered_kv_nvme.recovery import SegmentScan

_PARALLEL_READS: Final = 4
_KNOWN_CODECS: Final = frozenset(CODEC_IDS.values())


class Place(NamedTuple):
    """Where a block was found, and in which use of its segment."""

    epoch: int
    slot: int
    generation: int
    entry: SegmentEntry


class _Wanted(NamedTuple):
    """A block to read."""

    position: int  # in the call of `read`
    block: StoredBlock
    row: memoryview

    @property
    def entry(self) -> SegmentEntry:
        entry: SegmentEntry = self.block.where.entry
        return entry

    @property
    def is_in_pages(self) -> bool:
        """Whether the payload, and its place in the row, begin and end on pages."""
        offset, size_bytes, address = self.entry.offset, self.entry.stored_bytes, address_of(self.row) + HEADER_BYTES
        return not (offset | size_bytes | address) % PAGE_BYTES


@dataclass(eq=False)
class StoredRecords:
    """The blocks of one directory, which `inspection` reads."""

    inspection: Inspection

    def blocks(self, keys: Set[OffloadKey] | None) -> Iterator[Sequence[StoredBlock]]:
        """Yield the valid blocks, those of the last written segments first; only those of `keys` if given."""
        found = self.inspection
        scan = SegmentScan(Disk(), found.identity, found.epoch, found.counters, checks_payloads=False)
        for slot, fd, segment in found.segments(scan, "copy", newest_first=True):
            table = EntryTable() if segment is None else segment.table
            generation = 0 if segment is None else segment.generation
            used_s = os.fstat(fd).st_mtime
            for start in range(0, len(table), RUN_BLOCKS_MAX):
                ordinals = range(start, min(start + RUN_BLOCKS_MAX, len(table)))
                batch = []
                for key, ordinal in zip(table.keys(ordinals), ordinals, strict=True):
                    if keys is None or key in keys:
                        place = Place(found.epoch, slot, generation, table[ordinal])
                        batch.append(StoredBlock(key, HEADER_BYTES + place.entry.stored_bytes, used_s, place))
                if batch:
                    yield batch
                found.check_time("copy")

    def read(self, blocks: Sequence[StoredBlock], rows: Sequence[memoryview]) -> list[RecordStatus | str]:
        """Read the record of each block into its row; see `TierAdministration.read_records`."""
        statuses: list[RecordStatus | str] = [Reason.RESET] * len(blocks)
        wanted = [
            _Wanted(at, block, row)
            for at, (block, row) in enumerate(zip(blocks, rows, strict=True))
            if block.where.epoch == self.inspection.epoch
        ]
        wanted.sort(key=lambda each: (each.block.where.slot, each.entry.offset))
        for slot, group in groupby(wanted, key=lambda each: int(each.block.where.slot)):
            of_slot = list(group)
            for each, status in zip(of_slot, self._read_segment(slot, of_slot), strict=True):
                statuses[each.position] = status
        return statuses

    def _read_segment(self, slot: int, wanted: Sequence[_Wanted]) -> list[RecordStatus | str]:
        """Read blocks of one segment, sorted by offset."""
        found, statuses = self.inspection, list[RecordStatus | str]()
        name = segment_name(found.identity.digest, slot)
        try:
            with opened(name, os.O_RDONLY, dir_fd=found.fd) as fd, self._direct(name, wanted) as direct_fd:
                check_file(fd, f"{found.path}/{name}", any_owner=not found.claimed.private)
                read = partial(self._read_run, fd, direct_fd)
                for done in run_all(read, _runs(wanted), "tiered-kv-copy", _PARALLEL_READS):
                    statuses += done.result()
                if RecordStatus.BAD_CHECKSUM in statuses:
                    header = SegmentHeader.decode(memoryview(os.pread(fd, PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0")))
                    generation = None if header is None else header.generation
                    return [_in_use(each, status, generation) for each, status in zip(wanted, statuses, strict=True)]
        except FileNotFoundError:
            statuses += [Reason.ABSENT] * (len(wanted) - len(statuses))
        except OSError:
            statuses += [Reason.IO_ERROR] * (len(wanted) - len(statuses))
        return statuses

    @contextmanager
    def _direct(self, name: str, wanted: Sequence[_Wanted]) -> Iterator[int | None]:
        """Yield a descriptor past the page cache, which reads in larger pieces; None if not all of it is in pages."""
        fd = None
        if all(each.is_in_pages for each in wanted):
            with suppress(OSError):  # a file system that has none
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT, dir_fd=self.inspection.fd)
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def _read_run(self, fd: int, direct_fd: int | None, run: Sequence[_Wanted]) -> list[RecordStatus | str]:
        """Read neighbouring payloads by one call, straight behind the headers of their rows."""
        buffers: list[memoryview] = []
        start = at = run[0].entry.offset
        for each in run:
            offset, stored_bytes = each.entry.offset, each.entry.stored_bytes
            if offset > at:
                buffers.append(_scratch.take(GAP_BYTES_MAX)[: offset - at])
            buffers.append(each.row[HEADER_BYTES : HEADER_BYTES + stored_bytes])
            at = offset + stored_bytes
        if direct_fd is not None:
            with suppress(OSError):  # refused after all; or a bad place, which the other read shows
                end = start + read_all(direct_fd, buffers, start)
                return [self._sealed(each, end) for each in run]
        try:
            end = start + read_all(fd, buffers, start)
            os.posix_fadvise(fd, start, at - start, os.POSIX_FADV_DONTNEED)  # spare the page cache
        except OSError as error:
            if len(run) == 1:
                return [self.inspection.found(error, fd)]
            return [status for each in run for status in self._read_run(fd, None, [each])]
        return [self._sealed(each, end) for each in run]

    def _sealed(self, wanted: _Wanted, end: int) -> RecordStatus | str:
        """Check a payload, and write the header of its record; return its status."""
        entry, identity, row = wanted.entry, self.inspection.identity, wanted.row
        payload = row[HEADER_BYTES : HEADER_BYTES + entry.stored_bytes]
        if entry.offset + entry.stored_bytes > end or checksum(payload) != entry.checksum:
            return RecordStatus.BAD_CHECKSUM
        if entry.codec not in _KNOWN_CODECS:
            return RecordStatus.UNKNOWN_CODEC
        if entry.stored_bytes not in payload_bytes_range(entry.codec, identity.block_bytes):
            return RecordStatus.BAD_LENGTH
        write_header(row, wanted.block.key, entry.codec, identity.block_bytes, entry.stored_bytes, identity.digest)
        return RecordStatus.OK


_scratch = ThreadBuffer()  # for the bytes between two payloads


def _runs(wanted: Sequence[_Wanted]) -> list[list[_Wanted]]:
    runs: list[list[_Wanted]] = []
    for each in wanted:
        entry = each.entry
        if runs:
            first, last = runs[-1][0].entry, runs[-1][-1].entry
            gap = entry.offset - last.offset - last.stored_bytes
            is_near = 0 <= gap <= GAP_BYTES_MAX and entry.offset + entry.stored_bytes - first.offset <= SPAN_BYTES_MAX
            if is_near and len(runs[-1]) < RUN_BLOCKS_MAX:
                runs[-1].append(each)
                continue
        runs.append([each])
    return runs


def _in_use(wanted: _Wanted, status: RecordStatus | str, generation: int | None) -> RecordStatus | str:
    """Return ABSENT for a payload that is not the block's since its segment is in another use by now."""
    is_reused = status is RecordStatus.BAD_CHECKSUM and generation != wanted.block.where.generation
    return Reason.ABSENT if is_reused else status
