"""Counters as metrics with labels, and a collector that reads them for each scrape of Prometheus.

The HTTP server's threads call it, or any thread of a program with a registry of its own. The number of series is
bounded. Each name and label is a plain word: a third-party tier may use a key, a password or a message as a name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tiered_kv.config.secrets import HIDDEN, scrub
from tiered_kv.errors import MissingExtraError, ShutdownError
from tiered_kv.metrics.counters import LABELS_MAX, OTHER
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.own import OwnStats
from tiered_kv.metrics.series import CounterView, Snapshot, Value
from tiered_kv.metrics.vocabulary import PREFIX, TIER_PREFIX
from tiered_kv.system.step import give_way

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

Read = Callable[[], Snapshot | CounterView]
"""Returns the counters of a stack, as `Stack.counters` or `Stack.snapshot`; any thread may call."""

NAME_SERIES_MAX: Final = LABELS_MAX + 8
"""Limit of the series of one metric of a tier. All numbers that the tier's type does not declare count as one
metric."""
DROPPED: Final = "dropped_series"
DROPPED_METRIC: Final = Metric(DROPPED, "Numbers of the tier that are no metrics: too many, or unfit names or values.")
THIRD_PARTY: Final = f"{TIER_PREFIX}number"
THIRD_PARTY_METRIC: Final = Metric(
    "number", "A number that the tier's type does not declare; its author says which.", ("name", "labels")
)
_LABEL = re.compile(r"[\w.:-]{1,64}", re.ASCII)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposed(NamedTuple):
    """A number or a histogram, with the name and the labels under which it is exposed."""

    name: str
    metric: Metric
    labels: tuple[str, ...]
    """The values of the labels, `tier` first."""
    value: Value


def series_of(counters: Snapshot | CounterView, secrets: set[str]) -> Iterator[Exposed]:
    """Yield the series of a stack, each once. No name and no label holds any of `secrets`."""
    snapshot = counters.snapshot if isinstance(counters, CounterView) else counters
    for tier, metric, labels, value in snapshot:
        yield Exposed(PREFIX + metric.name, metric, (tier, *labels), value)
    for tier, counted in snapshot.tiers.items():
        if counted.own is not None:
            yield from _own_series(tier, counted.own, secrets)


def safe_label(text: str, secrets: set[str]) -> str:
    """Return `text` if it is a plain word without a secret, else a word in its place."""
    if not _LABEL.fullmatch(text):
        return OTHER
    return text if scrub(text, secrets) == text else HIDDEN


def _own_series(tier: str, own: OwnStats, secrets: set[str]) -> Iterator[Exposed]:
    """Yield the series of a tier's own counters. Those of a third-party tier may have any form."""
    seen: set[tuple[str, ...]] = set()
    counts: Counter[str] = Counter()  # series by name
    dropped = 0
    for number in own:
        labels = tuple(safe_label(text, secrets) for text in number.labels)
        if number.metric is not None:
            metric, name = number.metric, TIER_PREFIX + number.name
        else:
            metric, name = THIRD_PARTY_METRIC, THIRD_PARTY
            labels = safe_label(number.name, secrets), ",".join(labels)
        value, identity = number.value, (name, *labels)
        if value is not None and identity not in seen and counts[name] < NAME_SERIES_MAX:
            seen.add(identity)
            counts[name] += 1
            yield Exposed(name, metric, (tier, *labels), value)
        else:
            dropped += 1
    yield Exposed(PREFIX + DROPPED, DROPPED_METRIC, (tier,), dropped)


class StackCollector:
    """A collector for a registry of `prometheus_client`. Any thread may call.

        REGISTRY.register(StackCollector(stack.counters, secrets=stack.config.secret_texts()))

    A closed stack has no metrics. Every metric also has `labels`. No name and no label holds any of `secrets`.

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
                for name, metric, of_series, value in series_of(read(), secrets):
                    give_way()
                    family = families.get(name)
                    if family is None:
                        family = families[name] = _family(name, metric, labels)
                    values = [*labels.values(), *of_series]
                    if isinstance(value, dict):
                        buckets = value["buckets"]
                        cumulative = list(zip(buckets, accumulate(buckets.values()), strict=True))
                        family.add_metric(values, cumulative, value["sum"])
                    else:
                        family.add_metric(values, value)
        for family in families.values():
            give_way()  # the write of a family takes some 30 us
            yield family


def _family(name: str, metric: Metric, labels: Iterable[str]) -> Any:  # Any: as above
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names = [*labels, "tier", *metric.labels]
    if metric.bounds:
        return HistogramMetricFamily(name, metric.help, labels=names)
    kind = CounterMetricFamily if metric.is_total else GaugeMetricFamily
    return kind(name, metric.help, labels=names)


def exposition(*collectors: StackCollector) -> bytes:
    """Return all metrics in Prometheus' text format 0.0.4. Several collectors must have different `labels`."""
    from prometheus_client import CollectorRegistry, generate_latest

    together, registry = StackCollector(Snapshot), CollectorRegistry(auto_describe=False)
    together._sources = [source for collector in collectors for source in collector._sources]
    registry.register(together)
    return generate_latest(registry)
