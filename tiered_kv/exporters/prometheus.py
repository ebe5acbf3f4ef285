"""Counters as Prometheus metrics: a collector that reads them for each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tiered_kv.errors import MissingExtraError, ShutdownError
from tiered_kv.exporters.series import Read, Series, series_of
from tiered_kv.metrics.vocabulary import TOTAL
from tiered_kv.pauses import give_way

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StackCollector:
    """A collector for a registry of `prometheus_client`. Any thread may call.

        REGISTRY.register(StackCollector(stack.counters, secrets=stack.config.secret_texts()))

    A closed stack has no metrics.

    Args:
        counters: Returns the counters; `Stack.counters`, for example.
        labels: Further labels of every metric, such as the number of an engine.
        secrets: Texts that no name and no label may hold.

    Raises:
        MissingExtraError: `prometheus_client` is not installed.
    """

    def __init__(
        self, counters: Read, *, labels: Mapping[str, str] | None = None, secrets: set[str] | None = None
    ) -> None:
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("the metrics of a stack", "metrics") from error
        self._counters = counters
        self._labels = dict(labels or {})
        self._secrets = secrets or set()

    def describe(self) -> list[Metric]:
        """Return nothing, so that a registry need not read counters to register this."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        try:
            counters = self._counters()
        except ShutdownError:
            return
        families: dict[str, Any] = {}  # Any: a family, whose `add_metric` depends on its type
        for series in series_of(counters, self._secrets):
            give_way()
            family = families.get(series.name)
            if family is None:
                family = families[series.name] = self._family(series)
            labels = [*self._labels.values(), *series.labels]
            if series.metric.bounds:
                buckets: Mapping[str, int] = series.value["buckets"]
                cumulative = list(zip(buckets, accumulate(buckets.values()), strict=True))
                family.add_metric(labels, cumulative, series.value["sum"])
            else:
                family.add_metric(labels, series.value)
        for family in families.values():
            give_way()  # to write a family takes some 30 us
            yield family

    def _family(self, series: Series) -> Any:  # Any: as above
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        about = series.metric.help
        names = [*self._labels, "tier", *series.metric.labels]
        if series.metric.bounds:
            return HistogramMetricFamily(series.name, about, labels=names)
        kind = CounterMetricFamily if series.name.endswith(TOTAL) else GaugeMetricFamily
        return kind(series.name, about, labels=names)


def exposition(collector: StackCollector) -> bytes:
    """Return all metrics in Prometheus' text format 0.0.4."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
