"""Our counters as vLLM's metrics.

vLLM declares a metric's labels before it starts, and our tiers, a stranger's among them, may count what they like. So
there is one gauge. Its labels tell the tier, the counter, and the counter's own labels; docs/reference/counters.md says
what each counts. What a tier counts itself has names that begin with `tier_`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingGaugeMetadata

from tiered_kv.counters import flat_counts

COUNTER_METRIC = "vllm:tiered_kv_counter"
"""Its prefix is vLLM's, because vLLM takes back only metrics of that prefix when an engine ends."""

_INTERVAL_S = 1.0


def metric_definitions() -> dict[str, Any]:  # Any: vLLM's OffloadingMetricMetadata
    """Return the declaration of our metric."""
    metadata = OffloadingGaugeMetadata(
        documentation="Tiered KV's counters, and gauges such as used_bytes, as they stand now.",
        labelnames=("tier", "counter", "labels"),
    )
    return {COUNTER_METRIC: metadata}


class CounterReport:
    """Makes a snapshot of counters for vLLM, at most once a second: vLLM asks in every step.

    Args:
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()

    def take(
        self, counters: Callable[[], Mapping[str, Mapping[str, Any]]]
    ) -> Any:  # Any: numbers, nested by label; OffloadingConnectorStats or None
        """Return the counters by tier as vLLM's statistics, or None where it is too early."""
        now_s = self._clock()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + _INTERVAL_S
        stats = OffloadingConnectorStats()
        for tier, values in counters().items():
            for (name, *labels), value in flat_counts(values):
                if name == "tier":
                    name = f"tier_{labels.pop(0)}"
                stats.set_gauge(COUNTER_METRIC, value, (tier, name, ",".join(labels)))
        return stats
