"""Checks of the metrics that plugins declare for their tiers, when a tier type is made, and when it is registered.

`TierType` and `TierPlugins` call these functions, on the thread that opens a stack or registers a plugin. What must
stay true: one name is one metric in a process, since Prometheus takes each name once, with one help and one set of
labels. Tier types may share a metric if they declare it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from tiered_kv.errors import ConfigError
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import COMMON

METRICS_MAX: Final = 128
"""Metrics of one tier type."""
_TAKEN: Final = ("number",)
"""The exporters use this name for numbers that no tier type declares."""


def checked_metrics(metrics: object) -> tuple[Metric, ...]:
    """Return the metrics that a plugin declares for one tier, if Prometheus can tell them apart.

    Raises:
        ConfigError: The argument is no tuple of metrics, there are too many, or two have one name.
    """
    if not isinstance(metrics, (tuple, list)) or not all(isinstance(each, Metric) for each in metrics):
        raise ConfigError(f"its metrics are no tuple of Metric: {metrics!r}")
    if len(metrics) > METRICS_MAX:
        raise ConfigError(f"it declares {len(metrics)} metrics; {METRICS_MAX} is the most")
    names = dict[str, str]()
    for metric in metrics:
        if metric.name in _TAKEN:
            raise ConfigError(f"its metric '{metric.name}' has a name that the exporters use; rename it")
        if metric.stem in names:
            raise ConfigError(f"'{names[metric.stem]}' and '{metric.name}' are one metric to Prometheus; rename one")
        names[metric.stem] = metric.name
    refuse_conflicts("it", metrics, {"several tiers, see tiered_kv.metrics.vocabulary.common_metrics": COMMON.values()})
    return tuple(metrics)


def refuse_conflicts(owner: str, metrics: Iterable[Metric], others: Mapping[str, Iterable[Metric]]) -> None:
    """Raise `ConfigError` if `others`, by the names of their owners, declare one of `metrics` in another way."""
    taken = {metric.stem: (other, metric) for other, declared in others.items() for metric in declared}
    for metric in metrics:
        other, known = taken.get(metric.stem, ("", metric))
        if known != metric:
            what = f"the metric '{metric.name}', but it is {_described(known)} of {other}"
            raise ConfigError(f"{owner} declares {what}; rename it, or declare it alike")


def _described(metric: Metric) -> str:
    labels = f" with the labels {', '.join(metric.labels)}" if metric.labels else " without labels"
    return f"'{metric.name}'{labels}, \"{metric.help}\""
