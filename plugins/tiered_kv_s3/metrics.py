"""The metrics of the s3 tier.

Its bucket, connections, lookups and sweeps count them, on their threads. `S3Tier.stats` adds the gauges.
"""

from __future__ import annotations

from typing import Final

from tiered_kv.metrics.metric import Metric
from tiered_kv.toolkit.objects.metrics import OBJECT_METRICS

METRICS: Final = (
    *OBJECT_METRICS,
    Metric("opened_connections_total", "Connections opened."),
    Metric("open_connections", "Connections open at present."),
)
