"""Series: the numbers and histograms of a stack at one moment, each under its metric and the values of its labels.

Accounts, managers and the tiers' types make them, `registry.Registry` collects them, and the exporters, the command and
the engines' plugins iterate over them. A snapshot never changes. Any thread may read one.

`Stack.counters` returns a view of a snapshot for users: dictionaries by tier, by name, and by the value of each label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiered_kv.metrics.histogram import HistogramValue
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.own import OwnStats

Number = int | float
Value = Number | HistogramValue
Labels = tuple[str, ...]
"""The values of a metric's labels, without the value of `tier`, in the order in which the metric names them."""


class Series(NamedTuple):
    """One number or histogram of one tier."""

    tier: str
    metric: Metric
    labels: Labels
    value: Value


class Family(NamedTuple):
    """All series that one tier has of one metric. A metric with labels has none before its first event."""

    metric: Metric
    values: Mapping[Labels, Value]

    def exposed(self) -> Mapping[Labels, Value]:
        """Return the values, and a 0 for each combination of labels in `Metric.values` that has none."""
        return {**dict.fromkeys(self.metric.values, 0), **self.values} if self.metric.values else self.values

    def nested(self) -> Any:  # Any: a number, a histogram, or dictionaries of them by label
        """Return the values as users read them."""
        if not self.metric.labels:
            return self.values[()]
        nested: dict[str, Any] = {}
        for (*above, last), value in self.values.items():
            inner = nested
            for label in above:
                inner = inner.setdefault(label, {})
            inner[last] = value
        return nested


def counts_of(metric: Metric, nested: Any) -> Iterator[tuple[dict[str, str], int]]:  # Any: as `Family.nested`
    """Yield the counts in `nested`, a result of `Family.nested`, each with the names and values of its labels."""
    found: list[tuple[dict[str, str], Any]] = [({}, nested)]
    for name in metric.labels:
        found = [({**labels, name: value}, inner) for labels, above in found for value, inner in above.items()]
    yield from found


def numbers(table: Mapping[str, Metric], values: Mapping[str, Number]) -> list[Family]:
    """Return `values`, numbers without labels by the names of their metrics in `table`, as families."""
    return [Family(table[name], {(): value}) for name, value in values.items()]


def by_label(metric: Metric, values: Mapping[str, Value]) -> Family:
    """Return the values of a metric with one label, by the value of this label, as a family."""
    return Family(metric, {(label,): value for label, value in values.items()})


@dataclass(frozen=True, slots=True)
class TierSeries:
    """The manager's counts of one tier, by the names of the metrics, and the tier's own numbers."""

    families: Mapping[str, Family]
    own: OwnStats | None = None

    def value(self, name: str, *labels: str) -> Any:  # Any: a number or a histogram, as the metric says
        """Return one value; 0 if it was not counted."""
        family = self.families.get(name)
        return 0 if family is None else family.values.get(labels, 0)

    def total(self, name: str) -> Number:
        """Return the sum of a counter over its labels; 0 if it was not counted."""
        family = self.families.get(name)
        return 0 if family is None else sum(value for value in family.values.values() if not isinstance(value, dict))

    def nested(self) -> dict[str, Any]:  # Any: as `Family.nested`; under "tier", what a tier's `stats` returned
        """Return everything as users read it."""
        found = {name: family.nested() for name, family in self.families.items()}
        return found if self.own is None else {**found, "tier": self.own.stats}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All series of a stack, by tier: the primary tier first, then the others in the order of the search."""

    tiers: Mapping[str, TierSeries] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Series]:
        """Yield the manager's counts; the tiers' own numbers are in `TierSeries.own`."""
        for tier, counted in self.tiers.items():
            for family in counted.families.values():
                for labels, value in family.exposed().items():
                    yield Series(tier, family.metric, labels, value)

    def with_families(self, tier: str, families: Iterable[Family]) -> Snapshot:
        """Return a snapshot that has further families of a tier."""
        counted = self.tiers[tier]
        more = {family.metric.name: family for family in families}
        return Snapshot({**self.tiers, tier: TierSeries({**counted.families, **more}, counted.own)})


class CounterView(dict[str, dict[str, Any]]):  # Any: as `TierSeries.nested`
    """A snapshot as users read it: by tier, then by name, then by label. The users may change it.

    Attributes:
        snapshot: The snapshot that the view shows.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__({tier: counted.nested() for tier, counted in snapshot.tiers.items()})
        self.snapshot = snapshot
