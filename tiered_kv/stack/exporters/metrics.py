"""Counters as metrics with labels, and a collector that reads them for each scrape of Prometheus.

The number of series is bounded, and each name and label is a plain word: a third-party tier may use a key, a password
or a whole message as a name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

from tiered_kv.config.hooks import tier_plugins
from tiered_kv.config.secrets import HIDDEN, scrub
from tiered_kv.errors import MissingExtraError, ShutdownError
from tiered_kv.metrics.counters import LABELS_MAX, OTHER
from tiered_kv.metrics.histogram import INFINITY, is_histogram
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import MANAGER, PREFIX, TIER_PREFIX
from tiered_kv.system.threads import give_way

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

Counters = Mapping[str, Mapping[str, Any]]  # Any: as `Stack.counters`
Read = Callable[[], Counters]
"""Returns counters; any thread may call."""

NAME_SERIES_MAX: Final = LABELS_MAX + 8
"""Limit of the series of one name in a tier. The numbers that the tier's type does not declare are one metric."""
DROPPED: Final = "dropped_series"
DROPPED_METRIC: Final = Metric(DROPPED, "Numbers of the tier that are no metrics: too many, or unfit names or values.")
THIRD_PARTY: Final = f"{TIER_PREFIX}number"
THIRD_PARTY_METRIC: Final = Metric(
    "number", "A number that the tier's type does not declare; its author says which.", ("name", "labels")
)
_DEPTH_MAX: Final = 4
_NUMBERS_MAX: Final = 4096
"""Numbers that are read of one tier's own counters."""
_LABEL = re.compile(r"[\w.:-]{1,64}", re.ASCII)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Series(NamedTuple):
    """A number or a histogram, with its name and labels."""

    name: str
    metric: Metric
    labels: tuple[str, ...]
    """The values of the labels, `tier` first."""
    value: Any  # Any: a number, or as `Histogram.snapshot`


def series_of(counters: Counters, secrets: set[str]) -> Iterator[Series]:
    """Yield the series of a stack's counters, each once. No name and no label holds any of `secrets`."""
    declared = tier_plugins().metrics()
    for tier, values in counters.items():
        yield from _managed_series(tier, values)
        if "tier" in values:
            yield from _own_series(tier, values["tier"], declared, secrets)


def safe_label(text: str, secrets: set[str]) -> str:
    """Return `text` if it is a plain word without a secret, else a word in its place."""
    if not _LABEL.fullmatch(text):
        return OTHER
    return text if scrub(text, secrets) == text else HIDDEN


def _managed_series(tier: str, values: Mapping[str, Any]) -> Iterator[Series]:
    for name, value in values.items():
        metric = MANAGER.get(name)
        if metric is not None:
            counted = dict.fromkeys(metric.values, 0) | dict(_leaves(value, len(metric.labels)))
            for labels, number in counted.items():
                yield Series(PREFIX + name, metric, (tier, *labels), number)


def _leaves(value: Any, depth_max: int = _DEPTH_MAX) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the numbers and histograms in `value`, each with its labels."""
    if isinstance(value, Mapping) and not is_histogram(value):
        if depth_max:
            for label, inner in list(value.items()):
                yield from (((str(label), *labels), number) for labels, number in _leaves(inner, depth_max - 1))
    else:
        yield (), value


def _own_series(
    tier: str, values: Mapping[str, Any], declared: Mapping[str, Metric], secrets: set[str]
) -> Iterator[Series]:
    """Yield the series of a tier's own counters. Those of a third-party tier may have any form."""
    seen: set[Series] = set()
    counts: Counter[str] = Counter()  # series by name
    dropped = 0
    zeros = [(name, labels, 0) for name in values if name in declared for labels in declared[name].values]
    found = list(numbers_of(values))
    known = {(name, labels) for name, labels, _ in found}
    for name, texts, number in (*found, *(zero for zero in zeros if zero[:2] not in known)):
        metric = declared.get(name)
        labels = tuple(safe_label(text, secrets) for text in texts)
        if metric is None:
            identity = Series(
                THIRD_PARTY, THIRD_PARTY_METRIC, (tier, safe_label(name, secrets), ",".join(labels)), None
            )
        else:
            identity = Series(TIER_PREFIX + name, metric, (tier, *labels), None)
        value = _histogram(number, identity.metric.bounds) if identity.metric.bounds else _float(number)
        is_fit = value is not None and len(identity.metric.labels) + 1 == len(identity.labels)
        if is_fit and identity not in seen and counts[identity.name] < NAME_SERIES_MAX:
            seen.add(identity)
            counts[identity.name] += 1
            yield identity._replace(value=value)
        else:
            dropped += 1
    yield Series(PREFIX + DROPPED, DROPPED_METRIC, (tier,), dropped)


def numbers_of(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield the numbers of a tier's own counters, at most `_NUMBERS_MAX`, each with its name and labels."""
    found = ((str(name), labels, number) for name, value in list(values.items()) for labels, number in _leaves(value))
    return itertools.islice(found, _NUMBERS_MAX)


def _float(number: object) -> float | None:
    """Return a number as Prometheus takes it; None for anything else."""
    if not isinstance(number, (int, float)):
        return None
    try:
        return float(number)
    except Exception:  # it is too large, or of a third-party class
        return None


def _histogram(value: object, bounds: Sequence[float]) -> dict[str, Any] | None:  # Any: as `Histogram.snapshot`
    """Return the snapshot of a histogram with these bounds; None for anything else."""
    if not is_histogram(value) or not isinstance(value, Mapping):
        return None
    total, buckets = _float(value.get("sum")), value["buckets"]
    names = [*map(repr, bounds), INFINITY]
    if total is None or [*buckets] != names or not all(type(count) is int and count >= 0 for count in buckets.values()):
        return None
    return {"sum": total, "count": sum(buckets.values()), "buckets": dict(buckets)}


def is_finite(number: object) -> TypeGuard[float]:
    """Return whether this is a number that JSON can hold."""
    value = _float(number)
    return value is not None and math.isfinite(value)


class StackCollector:
    """A collector for a registry of `prometheus_client`. Any thread may call.

        REGISTRY.register(StackCollector(stack.counters, secrets=stack.config.secret_texts()))

    A closed stack has no metrics. Every metric has `labels`, too, and no name and no label holds any of `secrets`.

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
        self._sources = [(counters, dict(labels or {}), secrets or set())]

    def describe(self) -> list[Family]:
        """Return nothing, so that a registry need not read counters to register this."""
        return []

    def collect(self) -> Iterator[Family]:
        families: dict[str, Any] = {}  # Any: a family, whose `add_metric` depends on its type
        for read, labels, secrets in self._sources:
            with suppress(ShutdownError):
                for series in series_of(read(), secrets):
                    give_way()
                    family = families.get(series.name)
                    if family is None:
                        family = families[series.name] = _family(series, labels)
                    values = [*labels.values(), *series.labels]
                    if series.metric.bounds:
                        buckets: Mapping[str, int] = series.value["buckets"]
                        cumulative = list(zip(buckets, accumulate(buckets.values()), strict=True))
                        family.add_metric(values, cumulative, series.value["sum"])
                    else:
                        family.add_metric(values, series.value)
        for family in families.values():
            give_way()  # to write a family takes some 30 us
            yield family


def _family(series: Series, labels: Iterable[str]) -> Any:  # Any: as above
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    about, names = series.metric.help, [*labels, "tier", *series.metric.labels]
    if series.metric.bounds:
        return HistogramMetricFamily(series.name, about, labels=names)
    kind = CounterMetricFamily if series.metric.is_total else GaugeMetricFamily
    return kind(series.name, about, labels=names)


def exposition(*collectors: StackCollector) -> bytes:
    """Return all metrics in Prometheus' text format 0.0.4. Several collectors differ in their labels."""
    from prometheus_client import CollectorRegistry, generate_latest

    together, registry = StackCollector(dict), CollectorRegistry(auto_describe=False)
    together._sources = [source for collector in collectors for source in collector._sources]
    registry.register(together)
    return generate_latest(registry)
