"""What the tier counts since it was opened."""

from __future__ import annotations

from typing import Final

COUNTERS: Final = {
    "stored_batches_total": "batches written",
    "io_errors_total": "system calls that failed, those for want of space included",
    "no_space_errors_total": "times the file system had less space than the capacity allows",
    "room_timeouts_total": "stores that were given up because no room was made in time",
    "refused_stores_total": "stores that were failed at once: the disk is full, and there is no segment to reclaim",
    "reclaimed_segments_total": "segments used again, or deleted, to make room",
    "relocated_blocks_total": "blocks that moved on when their segment was reclaimed, because they had been used",
    "evicted_blocks_total": "blocks that went with their segment",
    "wasted_bytes_total": "bytes of those that nobody had read since they were written",
    "recovered_blocks_total": "blocks found when the directory was opened",
    "discarded_segments_total": "segments found and not kept, because they were damaged or over the capacity",
    "deleted_segments_total": "segments whose file was given back",
    "damaged_segments_total": "segments given up because the disk failed in them, or their file was cut short",
    "resets_total": "times that the cache was reset",
}
COUNTERS_BY_LABEL: Final = {
    "corrupt_blocks_total": "blocks that nobody can read, by reason",
    "unreadable_blocks_total": "blocks that need a codec or a key that is not here, by reason",
}
