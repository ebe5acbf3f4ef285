"""The counters of an nvme tier."""

from __future__ import annotations

import logging
from typing import Final

from tiered_kv.metrics.instruments import Counters
from tiered_kv.toolkit.small_files import FirstFailures

_log = logging.getLogger("tiered_kv.nvme")

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
    "lost_segments_total",
)
"""`metrics/vocabulary.py` explains them."""
COUNTERS_BY_LABEL: Final = ("corrupt_blocks_total", "unreadable_blocks_total")


class StoreCounters(Counters):
    """Counts events of the store in the directory at `path`, and logs the first failure of each kind."""

    def __init__(self, path: str) -> None:
        super().__init__(COUNTERS, COUNTERS_BY_LABEL)
        self._failures = FirstFailures(_log, path)

    def note_io_error(self, operation: str, error: OSError) -> None:
        self.add("io_errors_total")
        self._failures.note(operation, error)
