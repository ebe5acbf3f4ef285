"""The metrics of the fs tier.

`BlockFiles`, `GrantClient` and `DirectorySweeper` count them, on any thread of the tier. `FsTier.stats` adds gauges.
"""

from __future__ import annotations

from typing import Final

from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import common_metrics

METRICS: Final = (
    *common_metrics(
        "used_bytes",
        "capacity_bytes",
        "evicted_blocks_total",
        "present_blocks_total",
        "corrupt_blocks_total",
        "unreadable_blocks_total",
        "epoch_repairs_total",
    ),
    Metric("granted_bytes", "Bytes that this process may store before it asks the ledger again."),
    Metric("failed_calls_total", "Calls of the file system that failed.", ("reason",)),
    Metric("surveys_total", "Surveys of the directory by this process."),
)
