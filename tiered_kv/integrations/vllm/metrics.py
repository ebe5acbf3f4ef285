"""What vLLM reports of us: our counters as its metrics, our events and hits in its words.

vLLM declares a metric's labels before it starts, and our tiers, a stranger's among them, may count what they like. So
there is one gauge. Its labels tell the tier, the counter, and the counter's own labels; docs/reference/counters.md says
what each counts. What a tier counts itself has names that begin with `tier_`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import Medium, OffloadingGaugeMetadata
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.base import OffloadingEvent
from tiered_kv.config.settings import TierSettings
from tiered_kv.counters import flat_counts
from tiered_kv.mediums import CPULoadStoreSpec

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
    """Makes a snapshot of counters for vLLM, at most once a second: vLLM asks in every step."""

    def __init__(self) -> None:
        self._next_s = time.monotonic()

    def take(self, counters: Callable[[], Mapping[str, Mapping[str, Any]]]) -> Any:  # Any: by label; vLLM's own
        """Return the counters by tier as vLLM's statistics, or None where it is too early."""
        now_s = time.monotonic()
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


def vllm_events(
    events: Iterable[OffloadingEvent], telling: Collection[str], locality: Any = None
) -> Iterator[VllmEvent]:
    """Yield `events` as vLLM's.

    Args:
        events: Ours; the medium of a secondary tier's is its name.
        telling: Names of tiers that report each block that they remove. vLLM remembers the block's tokens until then.
        locality: vLLM's Locality of secondary tiers, or None.
    """
    for event in events:
        is_primary = event.medium == CPULoadStoreSpec.medium()
        yield VllmEvent(
            keys=event.keys,
            medium=Medium.CPU if is_primary else Medium.STORAGE,
            removed=event.removed,
            locality=None if is_primary else locality,
            ownership=None if is_primary else event.medium,
            removal_expected=not event.removed and event.medium in telling,
        )


def hit_source(settings: TierSettings) -> CacheHitSource:
    """Return what vLLM's statistics call a hit in a tier: "disk" if it has a `path`; for others vLLM has no word."""
    return CacheHitSource.DISK if hasattr(settings, "path") else CacheHitSource.EXTERNAL_UNSPECIFIED
