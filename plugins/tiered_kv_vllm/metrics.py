"""Our counters as vLLM's metrics, and our events and hits as vLLM's types.

vLLM declares a connector's metrics in the process that serves `/metrics`, and adds the labels of model and engine. Each
engine's scheduler calls `CounterReport.take` on its thread, and sends the changes: the growth of a counter, a gauge's
value, and a histogram's new values. No growth is sent twice.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.base import OffloadingEvent
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import ConfigError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.histogram import HistogramValue
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.series import Snapshot, TierSeries, Value
from tiered_kv.metrics.vocabulary import COMMON, MANAGER, PREFIX, TIER_PREFIX
from tiered_kv.stack.exporters.metrics import (
    DROPPED,
    DROPPED_METRIC,
    THIRD_PARTY,
    THIRD_PARTY_METRIC,
    Exposed,
    series_of,
)

_INTERVAL_S = 1.0
_STEP_SERIES_MAX = 16
_OBSERVATIONS_MAX = 10_000
"""New values of a histogram that are sent at a time; if there are more, the first."""


def metric_definitions(tier_types: Iterable[str] = ()) -> dict[str, Any]:  # Any: vLLM's OffloadingMetricMetadata
    """Return the metrics of the manager, and what tiers of these types declare.

    The process that serves `/metrics` calls this, and opens no stack. vLLM fails if an engine sends a metric that is
    missing here.
    """
    definitions = {PREFIX + name: _definition(metric) for name, metric in MANAGER.items()}
    own = dict(COMMON)
    for name in tier_types:
        with suppress(ConfigError):  # the opening of the tier reports it
            own |= {metric.name: metric for metric in tier_plugins().resolve(name).metrics}
    definitions |= {TIER_PREFIX + name: _definition(metric) for name, metric in own.items()}
    definitions[PREFIX + DROPPED] = _definition(DROPPED_METRIC)
    definitions[THIRD_PARTY] = _definition(THIRD_PARTY_METRIC)
    return definitions


def tier_types_of(source: object) -> list[str]:
    """Return the types of the tiers of a stack; none if it cannot be read: the opening of the stack reports that."""

    def types(raw: Mapping[str, object]) -> list[str]:
        tiers = raw.get("secondary")
        listed = [tier for tier in tiers if isinstance(tier, Mapping)] if isinstance(tiers, list) else []
        return [str(fill_variables({"type": tier.get("type")}, os.environ)["type"]) for tier in listed]

    try:
        return from_source(source, types) if isinstance(source, (str, os.PathLike, Mapping)) else []
    except ConfigError:
        return []


def forget_metrics() -> None:
    """Unregister our metrics from `prometheus_client`, as vLLM does with its own before it declares them again.

    `TieredKVConnector` calls it before each declaration.
    """
    for collector in list(REGISTRY._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith(PREFIX):
            REGISTRY.unregister(collector)


def _definition(metric: Metric) -> Any:  # Any: as above
    fields = {"documentation": metric.help, "labelnames": ("tier", *metric.labels)}
    if metric.bounds:
        return OffloadingHistogramMetadata(**fields, buckets=metric.bounds)
    if metric.is_total:
        return OffloadingCounterMetadata(**fields)
    return OffloadingGaugeMetadata(**fields)


class CounterReport:
    """Sends changes of counters to vLLM, which calls `take` on the scheduler's thread in every step.

    So it reads the counters once a second at most, and sends a few series in each of the following steps. No name and
    no label may contain a text of `secrets`.
    """

    def __init__(self, secrets: set[str]) -> None:
        self._secrets = secrets
        self._next_s = time.monotonic()
        self._left: Iterator[Exposed] | None = None
        """Changed series that the next steps send; None if the counters are to be read again."""
        self._read = Snapshot()
        """The series as they were read last."""
        self._sent: dict[tuple[str, ...], Value] = {}
        """The value that was sent last, by the name and the labels of a series."""

    def take(self, snapshot: Callable[[], Snapshot]) -> Any:  # Any: vLLM's own
        """Return the next changes as vLLM's statistics; None if all were sent, or until a second has passed."""
        if self._left is None:
            now_s = time.monotonic()
            if now_s < self._next_s:
                return None
            self._next_s = now_s + _INTERVAL_S
            last, self._read = self._read, snapshot()
            self._left = series_of(_changed(last, self._read), self._secrets)
        part = list(islice(self._left, _STEP_SERIES_MAX))
        if not part:
            self._left = None
            return None
        stats = OffloadingConnectorStats()
        for series in part:
            identity = (series.name, *series.labels)
            before = self._sent.get(identity)
            if before != series.value:
                self._sent[identity] = series.value
                _add(stats, series, before)
        return stats


def _changed(before: Snapshot, now: Snapshot) -> Snapshot:
    """Return the families that differ: most do not, and their series need not be made."""
    changed = dict[str, TierSeries]()
    for tier, counted in now.tiers.items():
        old = before.tiers.get(tier, TierSeries({}))
        families = {name: family for name, family in counted.families.items() if old.families.get(name) != family}
        is_same = old.own is not None and counted.own is not None and not _differ(old.own.stats, counted.own.stats)
        changed[tier] = TierSeries(families, None if is_same else counted.own)
    return Snapshot(changed)


def _differ(before: object, now: object) -> bool:
    try:
        return bool(before != now)
    except Exception:  # a third-party tier's numbers may have any form, such as an array's
        return True


def _add(stats: Any, series: Exposed, before: Value | None) -> None:  # Any: vLLM's own
    name, labels, value = series.name, series.labels, series.value
    if isinstance(value, dict):
        for observation in new_values(before if isinstance(before, dict) else None, value):
            stats.observe_histogram(name, observation, labels)
    elif series.metric.is_total:
        last = before if isinstance(before, (int, float)) else 0
        stats.increase_counter(name, max(value - last, 0), labels)
    else:
        stats.set_gauge(name, value, labels)


def new_values(before: HistogramValue | None, now: HistogramValue) -> list[float]:
    """Return values to add to a histogram that is at `before`, so that it is at `now`.

    Each bucket gets its new count. The sum agrees as far as the buckets allow.
    """
    counts = list(now["buckets"].values())
    total = now["sum"]
    if before is not None:
        counts = [count - old for count, old in zip(counts, before["buckets"].values(), strict=True)]
        total -= before["sum"]
    bounds = [0.0, *(float(name) for name in list(now["buckets"])[:-1])]
    ranges = [*pairwise(bounds), (bounds[-1], bounds[-1] + max(total, 1.0))]
    lowest = sum(count * low for count, (low, _) in zip(counts, ranges, strict=True))
    width = sum(count * (high - low) for count, (low, high) in zip(counts, ranges, strict=True))
    share = min(max((total - lowest) / width, 0.0), 1.0) if width else 0.0
    values: list[float] = []
    for count, (low, high) in zip(counts, ranges, strict=True):
        value = max(low + share * (high - low), math.nextafter(low, math.inf) if low else 0.0)
        values += [min(value, high)] * min(count, _OBSERVATIONS_MAX - len(values))
    return values


def vllm_events(
    events: Iterable[OffloadingEvent], reporting: Collection[str], locality: Any = None
) -> Iterator[VllmEvent]:
    """Yield `events` as vLLM's type, without `ownership`: Dynamo's indexer (1.6.1) ignores events of an owner.

    Args:
        reporting: Tiers that report each removed block. vLLM keeps the block's tokens until then.
        locality: vLLM's Locality of secondary tiers, or None.
    """
    for event in events:
        is_primary = event.medium == CPULoadStoreSpec.medium()
        yield VllmEvent(
            keys=event.keys,
            medium=Medium.CPU if is_primary else Medium.STORAGE,
            removed=event.removed,
            locality=None if is_primary else locality,
            ownership=None,
            removal_expected=not event.removed and event.medium in reporting,
        )


def hit_source(settings: TierSettings) -> CacheHitSource:
    """Return the name of vLLM's statistics for a hit in a tier: "disk" if it has a `path`, else "unspecified"."""
    return CacheHitSource.DISK if hasattr(settings, "path") else CacheHitSource.EXTERNAL_UNSPECIFIED
