"""The probe of a disk: after a failure, whether the disk takes transfers at other places.

Writers, readers and the reclaimer ask it on their own threads, after a failure only. A bad place costs the blocks of
that place, and no more. A disk that is away refuses every probe. Then no block is given up, since the blocks may be
whole when the disk comes back, and the tier's breaker keeps jobs away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv.toolkit.codecs import ThreadBuffer
from tiered_kv.toolkit.small_files import read_all
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.layout import PAGE_BYTES
from tiered_kv_nvme.pool import SegmentPool
from tiered_kv_nvme.segment import Segment, SegmentFiles, SegmentState

_SEGMENTS_MAX: Final = 3
"""How many segments' headers are tried, first the segment of the failure: its whole file may be bad."""


@dataclass(eq=False)
class DiskProbe:
    """Reads or rewrites the headers of a few segments until one succeeds. Any thread that may wait may call."""

    disk: Disk
    files: SegmentFiles
    pool: SegmentPool

    def takes_reads(self, segment: Segment) -> bool:
        """Return whether the disk reads another place. The caller has pinned the segment, in which a read failed."""
        page = ThreadBuffer().take(PAGE_BYTES)

        def read(each: Segment) -> bool:
            os.posix_fadvise(each.fd, 0, PAGE_BYTES, os.POSIX_FADV_DONTNEED)  # a cached page says nothing
            return read_all(each.fd, [page], 0, preadv=self.disk.preadv) == PAGE_BYTES

        return self._succeeds(read, segment)

    def takes_writes(self, segment: Segment, refused_offset: int = 0) -> bool:
        """Return whether the disk writes another place. The segment's own header, if written, notes `refused_offset`.

        The other headers are written unchanged, so nothing changes for a reader. The caller keeps the segment from
        being reclaimed.
        """

        def write(each: Segment) -> bool:
            offset = refused_offset if each is segment else 0
            self.files.write_header(each, each.generation, offset or each.refused_offset)
            return True

        return self._succeeds(write, segment)

    def _succeeds(self, transfer: Callable[[Segment], bool], segment: Segment) -> bool:
        with self._pinned(segment) as segments:
            for each in segments:
                with suppress(OSError):
                    if transfer(each):
                        return True
        return False

    @contextmanager
    def _pinned(self, first: Segment) -> Iterator[list[Segment]]:
        """Yield a segment and some others, which are neither reclaimed nor closed meanwhile."""
        usable = (SegmentState.ACTIVE, SegmentState.FULL, SegmentState.SEALED)
        with self.pool.changed:
            # A damaged segment is not written: this process may not know its header, which the next opening may read.
            sound = [each for each in self.pool.segments.values() if each.state in usable and not each.damaged]
            others = [each for each in sound if each is not first]
            others.sort(key=lambda each: (each.refused_offset > 0, each.readers))
            chosen = others[: _SEGMENTS_MAX - 1]
            slots = [each.slot for each in chosen]
            self.pool.pin(slots)
        try:
            yield [first, *chosen]
        finally:
            with self.pool.changed:
                self.pool.unpin(slots)
