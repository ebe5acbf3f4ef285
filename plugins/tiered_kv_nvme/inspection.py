"""Inspection of a directory: counts and checks its blocks, also while a process uses it.

Reading needs no lock. A segment may be reclaimed and filled again meanwhile, but its new header is written first. So
after each read, the reader compares the generation in the header, and ignores what it read if that has changed.

Deleting a block needs the lock. It rewrites the summary of the block's segment without the block.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import TierUnavailableError
from tiered_kv.permissions import check_file
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.administration import Census, SurveyedSegments, Verification
from tiered_kv.toolkit.claimed import LOST_AND_FOUND, Identity, walk
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, EpochMark
from tiered_kv.toolkit.small_files import read_file
from tiered_kv_nvme.counters import StoreCounters
from tiered_kv_nvme.directory import OWN_NAMES, Directory, segment_pattern
from tiered_kv_nvme.disk import OPEN_FLAGS, Disk, Scratch
from tiered_kv_nvme.epoch import EPOCH_NAME
from tiered_kv_nvme.files import SegmentFiles
from tiered_kv_nvme.layout import PAGE_BYTES, EntryTable, SegmentHeader
from tiered_kv_nvme.reader import decode_payload, neighbours, read_payloads
from tiered_kv_nvme.recovery import SegmentScan
from tiered_kv_nvme.segment import Segment

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CHANGED: Final = "segments were written again meanwhile; the blocks that they held before were not checked"


@dataclass(eq=False)
class Inspection:
    """The inspection of a directory whose marker has `identity`. One thread."""

    fd: int  # of the directory
    path: str
    tier: str
    private: bool
    identity: Identity
    deadline: float

    def __post_init__(self) -> None:
        self._digest = self.identity.digest.hex()
        self._pattern = segment_pattern(self.identity.digest)
        self._counters = StoreCounters(self.path)  # not reported
        self._scratch = Scratch()
        data = read_file(f"{self.path}/{EPOCH_NAME}", PAGE_BYTES)
        mark = EpochMark.decode((data or b"")[:MARK_BYTES_MAX].rstrip(b"\0"))
        self._epoch = 0 if mark is None else int(mark.value, 16)  # without a mark no block is valid

    def count(self, census: Census) -> SurveyedSegments:
        files = size_bytes = free = unusable = filled_bytes = 0
        for entries in walk(f"/proc/self/fd/{self.fd}"):
            for name, status in entries:
                if self._pattern.fullmatch(name) and stat.S_ISREG(status.st_mode):
                    files += 1
                    size_bytes += status.st_size
                    census.add(self._digest, status.st_blocks * 512, 0)
                elif name not in OWN_NAMES | {LOST_AND_FOUND}:
                    census.add_foreign(name, status.st_blocks * 512)
        scan = SegmentScan(Disk(), self.identity, self._epoch, self._counters, checks_payloads=False)
        for _, fd, segment in self._segments(scan, "survey"):
            if segment is None:
                unusable += _is_damaged(fd)
                continue
            blocks = len(segment.table)
            free += not blocks
            filled_bytes += segment.end_offset if blocks else 0
            census.add(self._digest, 0, blocks, written_s=time.time() - os.fstat(fd).st_mtime)
        return SurveyedSegments(files, free, unusable, size_bytes, filled_bytes)

    def verify(self, codecs: CodecSet, verification: Verification, owned: Directory | None) -> None:
        """Check the payload of every valid block; if the directory is `owned`, delete damaged blocks."""
        files = None if owned is None else SegmentFiles(Disk(), owned, False, self._counters, 0, 0, 0)
        scan = SegmentScan(Disk(), self.identity, self._epoch, self._counters)
        self._codecs, self._block = codecs, Scratch().take(self.identity.block_bytes)
        for slot, fd, segment in self._segments(scan, "verify", for_writing=files is not None):
            if segment is None:
                if _is_damaged(fd) and verification.note(RecordStatus.BAD_HEADER, PAGE_BYTES) and files is not None:
                    files.discard(slot)
                    verification.repaired += 1
                continue
            damaged = set(self._damaged(segment, verification))
            if damaged and files is not None:
                segment.table = _without(segment.table, damaged)
                if not len(segment.table):
                    files.discard(slot)
                if not len(segment.table) or files.seal(segment):
                    verification.repaired += len(damaged)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # spare the page cache

    def _damaged(self, segment: Segment, verification: Verification) -> Iterator[int]:
        """Check a segment's blocks; yield the ordinals of blocks to delete."""
        table = segment.table
        order = sorted(range(len(table)), key=table.offsets.__getitem__)
        for run in neighbours(table, order):
            found = self._read(segment, run)
            header = SegmentHeader.decode(_first_page(segment.fd))
            if header is None or header.generation != segment.generation:
                if _CHANGED not in verification.notes:
                    verification.notes.append(_CHANGED)
                return
            for ordinal, status in zip(run, found, strict=True):
                if verification.note(status, table.stored_bytes[ordinal]):
                    yield ordinal
            self._check_time("verify")

    def _read(self, segment: Segment, run: Sequence[int]) -> list[RecordStatus | str]:
        """Read and verify some neighbouring entries; return a status for each."""
        entries = [segment.table[ordinal] for ordinal in run]
        try:
            payloads = read_payloads(Disk(), self._scratch, segment.fd, entries)
        except OSError:
            if len(run) == 1:
                return ["io_error"]
            return [found for ordinal in run for found in self._read(segment, [ordinal])]
        found: list[RecordStatus | str] = []
        for ordinal, entry, payload in zip(run, entries, payloads, strict=True):
            key = segment.table.keys[ordinal]
            found.append(decode_payload(entry, key, payload, self._block, self.identity.digest, self._codecs))
        return found

    def _segments(
        self, scan: SegmentScan, operation: str, *, for_writing: bool = False
    ) -> Iterator[tuple[int, int, Segment | None]]:
        """Yield the slot and an open descriptor of each segment file, and the segment that `scan` reads there."""
        flags = OPEN_FLAGS if for_writing else _READ_FLAGS
        for name in sorted(os.listdir(self.fd)):
            match = self._pattern.fullmatch(name)
            if match is None:
                continue
            self._check_time(operation)
            try:
                fd = os.open(name, flags | os.O_NONBLOCK, dir_fd=self.fd)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):  # gone, or foreign
                    continue
                raise
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    check_file(fd, f"{self.path}/{name}", any_owner=not self.private)
                    yield int(match[1]), fd, scan.read(fd, int(match[1]))
            finally:
                os.close(fd)

    def _check_time(self, operation: str) -> None:
        if time.monotonic() >= self.deadline:
            raise TierUnavailableError("the time was over", tier=self.tier, operation=operation)


def _without(table: EntryTable, ordinals: set[int]) -> EntryTable:
    left = EntryTable()
    kept = [ordinal for ordinal in range(len(table)) if ordinal not in ordinals]
    left.append([table.keys[ordinal] for ordinal in kept], [table[ordinal] for ordinal in kept], [0] * len(kept))
    return left


def _is_damaged(fd: int) -> bool:
    """Return whether a file's header is damaged; a header of zeros was never written."""
    page = _first_page(fd)
    return SegmentHeader.decode(page) is None and any(page)


def _first_page(fd: int) -> memoryview:
    return memoryview(os.pread(fd, PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))
