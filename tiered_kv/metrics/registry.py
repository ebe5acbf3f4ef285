"""The registry: the sources of a stack's counts, and the one place that collects them.

The code that opens a manager adds the sources, before other threads read. Then any thread may take a snapshot. What
must stay true: each source gives a metric of a tier once, and returns without waiting for I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.own import OwnStats
from tiered_kv.metrics.series import Family, Snapshot, TierSeries

Source = Callable[[], Iterable[tuple[str, Iterable[Family]]]]
"""Returns families by the names of their tiers. Any thread may call."""


class Registry:
    """The sources of a stack's series, and the tiers that have numbers of their own."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._own: dict[str, tuple[Callable[[], Mapping[str, Any]], Mapping[str, Metric]]] = {}
        """The counts and metrics that each tier itself has, by tier."""

    def add(self, source: Source) -> None:
        """Add a source. A snapshot has the tiers in the order in which the sources name them first."""
        self._sources.append(source)

    def add_own(self, tier: str, stats: Callable[[], Mapping[str, Any]], metrics: Mapping[str, Metric]) -> None:
        """Add a tier's own numbers: its `stats`, checked, and the metrics that it may have."""
        self._own[tier] = stats, metrics

    def snapshot(self) -> Snapshot:
        """Return all series of this moment."""
        found: dict[str, dict[str, Family]] = {}
        for source in self._sources:
            for tier, families in source():
                of_tier = found.setdefault(tier, {})
                for family in families:
                    of_tier[family.metric.name] = family
        own = {tier: OwnStats(stats(), metrics) for tier, (stats, metrics) in self._own.items()}
        return Snapshot({tier: TierSeries(families, own.get(tier)) for tier, families in found.items()})
