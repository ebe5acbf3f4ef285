"""The metrics of the nvme tier: their names, help and labels.

The plugin's `TierType` declares them. `disk.StoreCounters` counts on all threads of the store, and `SegmentStore.stats`
adds the gauges.
"""

from __future__ import annotations

from typing import Final

from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import common_metrics

METRICS: Final = (
    *common_metrics(
        "blocks",
        "used_bytes",
        "capacity_bytes",
        "evicted_blocks_total",
        "wasted_bytes_total",
        "corrupt_blocks_total",
        "unreadable_blocks_total",
        "relocated_blocks_total",
        "recovered_blocks_total",
    ),
    Metric("io_errors_total", "System calls that failed, also for lack of space."),
    Metric("no_space_errors_total", "Times that the disk had less space than the capacity allows."),
    Metric("room_timeouts_total", "Stores for which no segment became free in time."),
    Metric("refused_stores_total", "Stores that failed at once: the disk was full, and had no segment to reclaim."),
    Metric("foreign_files", "Files in the directory that do not belong to the tier."),
    Metric("segments", "Segments in the directory."),
    Metric("free_segments", "Segments that are ready to be filled."),
    Metric("stored_batches_total", "Batches written."),
    Metric("reclaimed_segments_total", "Segments used again, or deleted, to make room."),
    Metric("discarded_segments_total", "Segments deleted at the opening: damaged, or over the capacity."),
    Metric("deleted_segments_total", "Segments whose file was deleted since the opening."),
    Metric(
        "damaged_segments_total",
        "Deleted segments where the disk failed, or whose file was cut short.",
    ),
    Metric(
        "refused_places_total", "Places of the disk that refused a write and are left out, while others take writes."
    ),
    Metric("left_out_segments", "Segments not or partly filled: a place of the disk refused a write."),
    Metric("lost_segments_total", "Segments whose file somebody else deleted or moved away."),
)
OF_TENANTS: Final = (*common_metrics("tenant_used_bytes", "tenant_share_bytes", "tenant_evicted_blocks_total"),)
"""Those that the tier has with `limits`; `SegmentShares` counts them."""
