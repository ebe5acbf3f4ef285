"""A metric: its name, meaning, labels and kind, as the core or the plugin of a tier declares them.

`metrics/vocabulary.py` declares the manager's metrics, and a plugin its tier's (`TierType.metrics`), when they are
imported. Counters, the exporters, the command and the engines read them, on any thread. A metric never changes, and is
well-formed: Prometheus takes its name, its labels and its help as they are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import ConfigError

TOTAL: Final = "_total"
"""How the name of a counter ends: a number that only grows."""
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_HELP_MAX: Final = 200
_NAME_MAX: Final = 64
_LABELS_MAX: Final = 3
_BOUNDS_MAX: Final = 64
_VALUES_MAX: Final = 64
_RESERVED_ENDINGS: Final = ("_bucket", "_count", "_sum", "_created", "_info")
_RESERVED_LABELS: Final = ("tier", "namespace", "engine", "model_name", "pid", "le", "quantile", "job", "instance")
"""Labels that the exporters, the engines or Prometheus add."""
_UNITS: Final = {
    **dict.fromkeys(("ns", "us", "ms", "milliseconds", "microseconds", "minutes", "hours"), "seconds"),
    **dict.fromkeys(("kb", "mb", "gb", "kib", "mib", "gib"), "bytes"),
    "percent": "ratio",
}
"""Units that no metric has, and the units to use instead."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, or a histogram, that a tier or the manager counts.

    Args:
        name: Lower-case words joined by "_". It ends with its unit (blocks, bytes, seconds, ratio ...), and then with
            `_total` if it only grows.
        help: What it counts, in a sentence.
        labels: The names of its labels, besides `tier`. A counter with labels is a dictionary by the first label, then
            by the next.
        bounds: The largest value of each bucket of a histogram, rising; empty for a number.
        values: Combinations of the labels' values that it has from the start, with 0. Others may follow.

    Raises:
        ConfigError: It is malformed.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if fault := _fault(self):
            raise ConfigError(f"the metric {self.name!r} {fault}")

    @property
    def is_total(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith(TOTAL)

    @property
    def stem(self) -> str:
        """The name without `_total`: to Prometheus two names with one stem are one metric."""
        return self.name.removesuffix(TOTAL)

    @property
    def unit(self) -> str:
        """The last word of the stem, such as "bytes"."""
        return self.stem.rpartition("_")[2]


def _fault(metric: Metric) -> str | None:
    """Return the fault of a declaration, in words that follow its name in a message; None if there is none."""
    name, labels = metric.name, metric.labels
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _NAME_MAX:
        return f"cannot be named so: it takes lower-case words and digits joined by '_', {_NAME_MAX} characters at most"
    if name.endswith(_RESERVED_ENDINGS):
        return f"cannot be named so: Prometheus uses the endings {', '.join(_RESERVED_ENDINGS)}"
    if metric.unit in _UNITS:
        return f"has the unit '{metric.unit}'; use '{_UNITS[metric.unit]}'"
    if not isinstance(metric.help, str) or not metric.help.isprintable() or not 0 < len(metric.help) <= _HELP_MAX:
        return f"needs a help: what it counts, in one line of {_HELP_MAX} characters at most"
    if not isinstance(labels, tuple) or len(labels) > _LABELS_MAX or len({*map(repr, labels)}) < len(labels):
        return f"needs labels as a tuple of at most {_LABELS_MAX} different names, found {labels!r}"
    for label in labels:
        if not isinstance(label, str) or not _NAME.fullmatch(label) or label in _RESERVED_LABELS:
            return f"cannot have the label {label!r}: it takes a lower-case word, none of {', '.join(_RESERVED_LABELS)}"
    bounds = metric.bounds
    if not isinstance(bounds, tuple) or not all(type(each) in (int, float) for each in bounds):
        return f"needs bounds as a tuple of numbers, found {bounds!r}"
    if len(bounds) > _BOUNDS_MAX or list(bounds) != sorted({*bounds}) or not all(map(_is_bound, bounds)):
        return f"needs at most {_BOUNDS_MAX} finite bounds, each larger than the one before"
    if bounds and metric.is_total:
        return "is a histogram: its name does not end with '_total'"
    values = metric.values
    if not isinstance(values, tuple) or len(values) > _VALUES_MAX or not all(_fits(each, labels) for each in values):
        return f"needs values as at most {_VALUES_MAX} tuples of {len(labels)} words each, one for each label"
    return None


def _is_bound(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int that no float holds
        return False


def _fits(values: object, labels: tuple[str, ...]) -> bool:
    return isinstance(values, tuple) and len(values) == len(labels) and all(isinstance(each, str) for each in values)
