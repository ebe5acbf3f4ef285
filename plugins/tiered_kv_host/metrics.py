"""The metrics of the host tier, which reports them in `HostTier.stats`."""

from __future__ import annotations

from typing import Final

from tiered_kv.metrics.metric import Metric

METRICS: Final = (Metric("is_attached", "1 while the server answers, else 0."),)
