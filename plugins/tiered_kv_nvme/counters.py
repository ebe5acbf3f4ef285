"""The names of what the tier counts since it was opened: `observe/vocabulary.py` explains them."""

from __future__ import annotations

from typing import Final

COUNTERS: Final = (
    "stored_batches_total",
    "io_errors_total",
    "no_space_errors_total",
    "room_timeouts_total",
    "refused_stores_total",
    "reclaimed_segments_total",
    "relocated_blocks_total",
    "evicted_blocks_total",
    "wasted_bytes_total",
    "recovered_blocks_total",
    "discarded_segments_total",
    "deleted_segments_total",
    "damaged_segments_total",
)
COUNTERS_BY_LABEL: Final = ("corrupt_blocks_total", "unreadable_blocks_total")
