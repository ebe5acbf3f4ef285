"""The metrics of the redis tier, which counts them on its worker threads."""

from __future__ import annotations

from typing import Final

from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import common_metrics

METRICS: Final = (
    *common_metrics(
        "present_blocks_total",
        "corrupt_blocks_total",
        "unanswered_lookups_total",
        "epoch_repairs_total",
    ),
    Metric("failed_blocks_total", "Blocks not stored or loaded, each by its own reason.", ("direction", "reason")),
    Metric("failed_lookups_total", "Lookups that a server did not answer.", ("reason",)),
)
