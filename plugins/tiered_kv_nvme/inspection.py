"""Reads the segments of a directory that a stack may have open: counts and checks its blocks.

`NvmeAdministration` and `StoredRecords` call it, on one thread. What must stay true: reading changes nothing, and takes
no bytes of a segment's later use for a block.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from tiered_kv.reasons import RecordStatus
from tiered_kv.system.file_systems import is_of_place
from tiered_kv.system.permissions import check_file
from tiered_kv.toolkit.administration import (
    SurveyedSegments,
    Verification,
)
from tiered_kv.toolkit.census import Census
from tiered_kv.toolkit.claimed import LOST_AND_FOUND, ClaimedDirectory, Identity, walk
from tiered_kv.toolkit.codecs import CodecSet, ThreadBuffer
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, EpochMark
from tiered_kv.toolkit.small_files import names_in, opened, read_file, remove
from tiered_kv_nvme.directory import (
    INDEX_NAME,
    OWN_NAMES,
    SegmentDirectory,
    segment_pattern,
)
from tiered_kv_nvme.disk import OPEN_FLAGS, Disk, StoreCounters
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.layout import PAGE_BYTES, TENANT_NUMBER_BYTES, SegmentHeader
from tiered_kv_nvme.reader import decode_payload, neighbours, read_payloads
from tiered_kv_nvme.recovery import SegmentScan
from tiered_kv_nvme.segment import Segment, SegmentFiles

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CHANGED: Final = "segments were written again meanwhile; the blocks that they held before were not checked"


@dataclass(eq=False)
class Inspection:
    """Counts and checks the blocks of a directory, whose marker has `identity`. One thread calls. A stack may run.

    Reading needs no lock. A segment may be reclaimed and filled again meanwhile, but its new header is written first.
    So after each read, the reader compares the generation in the header, and ignores the bytes if it has changed.

    Deleting a block needs the lock: the summary of its segment is written again without the block.
    """

    fd: int  # the directory's
    claimed: ClaimedDirectory
    identity: Identity
    check_time: Callable[[str], None]  # called with the operation; raises after the deadline

    def __post_init__(self) -> None:
        self.path = self.claimed.path
        self._digest = self.identity.digest.hex()
        self._pattern = segment_pattern(self.identity.digest)
        self.counters = StoreCounters(self.path)
        """Counters that the scans need. No report shows their counts."""
        self._scratch = ThreadBuffer()
        data = read_file(f"{self.path}/{EPOCH_NAME}", PAGE_BYTES)
        mark = EpochMark.decode((data or b"")[:MARK_BYTES_MAX].rstrip(b"\0"))
        self.epoch = 0 if mark is None else int(mark.value, 16)  # if there is no mark, no block is valid

    def count(self, census: Census) -> SurveyedSegments:
        files = size_bytes = free = unusable = left_out = filled_bytes = 0
        for entries in walk(f"/proc/self/fd/{self.fd}"):
            for name, status in entries:
                if self._pattern.fullmatch(name) and stat.S_ISREG(status.st_mode):
                    files += 1
                    size_bytes += status.st_size
                    census.add(self._digest, status.st_blocks * 512, 0)
                elif name == INDEX_NAME:
                    census.add(self._digest, status.st_blocks * 512, 0)
                elif name not in OWN_NAMES | {LOST_AND_FOUND}:
                    census.add_foreign(name, status.st_blocks * 512)
        scan = SegmentScan(Disk(), self.identity, self.epoch, self.counters, checks_payloads=False)
        for _, fd, segment in self.segments(scan, "survey"):
            if segment is None:
                unusable += _is_damaged(fd)
                continue
            blocks = len(segment.table)
            left_out += segment.refused_offset > 0
            free += not (blocks or segment.refused_offset)
            filled_bytes += segment.end_offset if blocks else 0
            census.add(self._digest, 0, blocks, written_s=time.time() - os.fstat(fd).st_mtime)
        return SurveyedSegments(files, free, unusable, size_bytes, filled_bytes, left_out)

    def verify(self, codecs: CodecSet, verification: Verification, owned: SegmentDirectory | None) -> None:
        """Check the payload of every valid block. If `owned`, the locked directory, is given, delete damaged blocks."""
        files = None if owned is None else SegmentFiles(Disk(), owned, False, self.counters, 0, 0, 0)
        if owned is not None:
            remove(INDEX_NAME, dir_fd=self.fd)  # the next opening builds it from what is left
        scan = SegmentScan(Disk(), self.identity, self.epoch, self.counters)
        self._codecs, self._block = codecs, ThreadBuffer().take(self.identity.block_bytes)
        for slot, fd, segment in self.segments(scan, "verify", for_writing=files is not None):
            path = f"{self.path}/segment-{self._digest[:8]}-{slot:06d}.kv"
            if segment is None:
                note = partial(verification.note, RecordStatus.BAD_HEADER, PAGE_BYTES, path)
                if _is_damaged(fd) and note() and files is not None:
                    files.discard(slot)
                    verification.repaired += 1
                continue
            damaged, failure = set(self._damaged(segment, path, verification)), scan.failure
            is_cut = False
            if failure is not None:
                is_cut = verification.note(self.found(failure, fd), 0, f"{path}, from byte {segment.end_offset} on")
            if (damaged or is_cut) and files is not None:
                segment.table = segment.table.without(damaged)
                if is_cut:
                    _end(segment)
                if not len(segment.table):
                    files.discard(slot)
                if not len(segment.table) or files.seal(segment, ["", *segment.tenant_names]):
                    verification.repaired += len(damaged) + is_cut
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # spare the page cache

    def _damaged(self, segment: Segment, path: str, verification: Verification) -> Iterator[int]:
        """Check a segment's blocks; yield the ordinals of blocks to delete."""
        table = segment.table
        order = sorted(range(len(table)), key=table.span)
        for run in neighbours(table, order):
            found = self._read(segment, run)
            header = SegmentHeader.decode(_first_page(segment.fd))
            if header is None or header.generation != segment.generation:
                if _CHANGED not in verification.notes:
                    verification.notes.append(_CHANGED)
                return
            for ordinal, status in zip(run, found, strict=True):
                offset, stored_bytes = table.span(ordinal)
                if verification.note(status, stored_bytes, f"{path}, at byte {offset}", table.keys([ordinal])[0]):
                    yield ordinal
            self.check_time("verify")

    def _read(self, segment: Segment, run: Sequence[int]) -> list[RecordStatus | str]:
        """Read and verify some neighbouring entries; return a status for each."""
        entries = [segment.table[ordinal] for ordinal in run]
        try:
            payloads = read_payloads(Disk(), self._scratch, segment.fd, entries)
        except OSError as error:
            if len(run) == 1:
                return [self.found(error, segment.fd)]
            return [found for ordinal in run for found in self._read(segment, [ordinal])]
        found: list[RecordStatus | str] = []
        for key, entry, payload in zip(segment.table.keys(run), entries, payloads, strict=True):
            found.append(decode_payload(entry, key, payload, self._block, self.identity.digest, self._codecs))
        return found

    def found(self, error: OSError, fd: int) -> RecordStatus | str:
        """Return the finding for a failed read: a bad place, if the disk can still read another place."""
        if is_of_place(error):
            with suppress(OSError):
                if _can_read(fd):
                    return RecordStatus.BAD_PLACE
            with suppress(OSError), opened(EPOCH_NAME, os.O_RDONLY, dir_fd=self.fd) as epoch_fd:
                if _can_read(epoch_fd):
                    return RecordStatus.BAD_PLACE
        return "io_error"

    def segments(
        self, scan: SegmentScan, operation: str, *, for_writing: bool = False, newest_first: bool = False
    ) -> Iterator[tuple[int, int, Segment | None]]:
        """Yield the slot and an open descriptor of each segment file, and the segment that `scan` reads there."""
        flags = OPEN_FLAGS if for_writing else _READ_FLAGS
        names = sorted(names_in(self.fd))
        if newest_first:
            names.sort(key=self._written_s, reverse=True)
        for name in names:
            match = self._pattern.fullmatch(name)
            if match is None:
                continue
            self.check_time(operation)
            try:
                fd = os.open(name, flags | os.O_NONBLOCK, dir_fd=self.fd)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):  # gone, or foreign
                    continue
                raise
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    check_file(fd, f"{self.path}/{name}", any_owner=not self.claimed.private)
                    yield int(match[1]), fd, scan.read(fd, int(match[1]))
            finally:
                os.close(fd)

    def _written_s(self, name: str) -> float:
        """Return when a file was written; 0 if it is gone."""
        with suppress(OSError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mtime
        return 0.0


def _end(segment: Segment) -> None:
    """Set a segment's end to the place of its summary: no reader looks for batches behind a bad place again."""
    segment.damaged = False
    table_bytes = segment.table.table_bytes(TENANT_NUMBER_BYTES * len(segment.table.tenants))
    segment.end_offset = segment.segment_bytes - PAGE_BYTES - table_bytes


def _can_read(fd: int) -> bool:
    """Return whether the disk reads the first page of a file. Raises `OSError`."""
    os.posix_fadvise(fd, 0, PAGE_BYTES, os.POSIX_FADV_DONTNEED)  # a cached page says nothing
    return len(os.pread(fd, PAGE_BYTES, 0)) == PAGE_BYTES


def _is_damaged(fd: int) -> bool:
    """Return whether a file's header is damaged; a header of zeros was never written."""
    page = _first_page(fd)
    return SegmentHeader.decode(page) is None and any(page)


def _first_page(fd: int) -> memoryview:
    return memoryview(os.pread(fd, PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))
