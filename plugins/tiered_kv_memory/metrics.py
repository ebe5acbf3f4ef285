"""The metrics of the memory tier, which counts them on its worker threads. `MemoryTier.stats` adds the gauges."""

from __future__ import annotations

from typing import Final

from tiered_kv.metrics.vocabulary import common_metrics

METRICS: Final = (
    *common_metrics(
        "blocks", "used_bytes", "capacity_bytes", "evicted_blocks_total", "wasted_bytes_total", "corrupt_blocks_total"
    ),
)
OF_TENANTS: Final = (*common_metrics("tenant_used_bytes", "tenant_share_bytes", "tenant_evicted_blocks_total"),)
"""Those that the tier has with `limits`; `SharedBlocks` counts them."""
