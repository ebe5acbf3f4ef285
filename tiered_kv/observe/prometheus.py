"""Counters as Prometheus metrics: a collector that reads them when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tiered_kv.errors import MissingExtraError, ShutdownError
from tiered_kv.observe.series import Read, Series, series_of
from tiered_kv.observe.vocabulary import TOTAL
from tiered_kv.tiering.step import give_way

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StackCollector:
    """A collector for a registry of `prometheus_client`. Any thread may call.

        REGISTRY.register(StackCollector(stack.counters, secrets=stack.config.secret_texts()))

    A stack that is closed has no metrics.

    Args:
        counters: What returns the counters, such as `Stack.counters`.
        labels: Labels that every metric gets besides its own, such as the number of an engine.
        secrets: Texts that no name and no label may hold.

    Raises:
        MissingExtraError: `prometheus_client` is not installed.
    """

    def __init__(
        self, counters: Read, *, labels: Mapping[str, str] | None = None, secrets: set[str] | None = None
    ) -> None:
        require_client()
        self._counters = counters
        self._labels = dict(labels or {})
        self._secrets = secrets or set()

    def describe(self) -> list[Metric]:
        """Return nothing: a registry need not read counters to register this."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand now."""
        from prometheus_client import Metric

        try:
            counters = self._counters()
        except ShutdownError:
            return
        families: dict[str, Metric] = {}
        for series in series_of(counters, self._secrets):
            give_way()
            family = families.get(series.name)
            if family is None:
                base, kind = series.name.removesuffix(TOTAL), _kind(series)
                family = families[series.name] = Metric(base, series.metric.help, kind)
            _add(
                family,
                series,
                {**self._labels, **dict(zip(("tier", *series.metric.labels), series.labels, strict=True))},
            )
        for family in families.values():
            give_way()  # to write a family takes some 30 us
            yield family


def exposition(collector: StackCollector) -> bytes:
    """Return what Prometheus reads, in its text format 0.0.4."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def require_client() -> None:
    """Raise `MissingExtraError` unless `prometheus_client` is installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the metrics of a stack", "metrics") from error


def _kind(series: Series) -> str:
    if series.metric.bounds:
        return "histogram"
    return "counter" if series.name.endswith(TOTAL) else "gauge"


def _add(family: Any, series: Series, labels: Mapping[str, str]) -> None:  # Any: a Metric; Any: as `Series.value`
    if not series.metric.bounds:
        family.add_sample(series.name, dict(labels), series.value)
        return
    buckets: Mapping[str, int] = series.value["buckets"]
    for bound, count in zip(buckets, accumulate(buckets.values()), strict=True):
        family.add_sample(f"{series.name}_bucket", {**labels, "le": bound}, count)
    family.add_sample(f"{series.name}_sum", dict(labels), series.value["sum"])
    family.add_sample(f"{series.name}_count", dict(labels), series.value["count"])
