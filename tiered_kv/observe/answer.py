"""What a process says of its stack on `/status`, checked: it may be of another version, or not a stack at all.

A field that is missing or of a wrong type stands for nothing known; a name holds no character that a terminal obeys.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tiered_kv.errors import FormatError
from tiered_kv.observe.histogram import INFINITY
from tiered_kv.observe.series import leaves

TIERS_MAX: Final = 65
NOTICES_MAX: Final = 64
_LABELS_MAX: Final = 64
_NAME_CHARACTERS_MAX: Final = 64
_TEXT_CHARACTERS_MAX: Final = 200
_NUMBER_MAX: Final = 1e24
"""A larger one is no count of anything here."""
_BREAKERS: Final = ("closed", "half_open", "open")
_COUNTERS: Final = {
    "stored_bytes_total": 0,
    "loaded_bytes_total": 0,
    "loaded_blocks_total": 0,
    "restored_tokens_total": 0,
    "blocks_total": 1,
    "misses_total": 1,
    "unexplained_blocks_total": 0,
    "skipped_blocks_total": 1,
    "failed_blocks_total": 2,
}
"""What is read of a tier's counters, and how many labels each has."""

Path = tuple[str, ...]
Buckets = Mapping[float, float]
"""How many values each bucket of a histogram has, by its largest value."""


@dataclass(frozen=True, slots=True)
class TierAnswer:
    """What is said of one tier; `counts` by the names and labels of `docs/reference/counters.md`."""

    name: str
    type: str
    breaker: str = ""
    is_disabled: bool = False
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    budgets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Used and limit, in bytes, of `store` and `load`."""
    counts: Mapping[Path, float] = field(default_factory=dict)
    seconds: Mapping[str, Buckets] = field(default_factory=dict)
    """Of `load` and `store` jobs, and of the manager's `step`."""


@dataclass(frozen=True, slots=True)
class NoticeAnswer:
    """Something that happened `age_s` seconds before the answer was made; `what` says how often, if more than once."""

    age_s: float
    tier: str
    what: str


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """What is said of a stack."""

    version: str
    namespace: str
    pid: int
    uptime_s: float
    tiers: tuple[TierAnswer, ...]
    notices: tuple[NoticeAnswer, ...]


def read_status(body: bytes) -> StatusAnswer:
    """Return what an answer says.

    Raises:
        FormatError: It is not the status of a stack.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        raise FormatError("the answer is not JSON") from None
    if not isinstance(told, dict) or not isinstance(told.get("tiers"), list):
        raise FormatError("the answer is not the status of a stack")
    now_s = _number(told.get("time")) or 0.0
    return StatusAnswer(
        version=clean(told.get("version")),
        namespace=clean(told.get("namespace")),
        pid=_whole(told.get("pid")) or 0,
        uptime_s=_number(told.get("uptime_seconds")) or 0.0,
        tiers=tuple(_tier(each) for each in told["tiers"][:TIERS_MAX] if isinstance(each, dict)),
        notices=tuple(_notices(told.get("notices"), now_s)),
    )


def clean(text: object, characters_max: int = _NAME_CHARACTERS_MAX) -> str:
    """Return a text without what a terminal obeys, or shows in another order or at no width of its own."""
    if not isinstance(text, str):
        return "?"
    cut = text[:characters_max] + ("…" if len(text) > characters_max else "")
    return "".join(
        each if each.isprintable() and not _is_combining(each) else "\N{REPLACEMENT CHARACTER}" for each in cut
    )


def _is_combining(character: str) -> bool:
    return not character.isascii() and unicodedata.category(character).startswith("M")


def _tier(told: Mapping[str, object]) -> TierAnswer:
    counters = _mapping(told.get("counters"))
    breaker = told.get("breaker")
    return TierAnswer(
        name=clean(told.get("name")),
        type=clean(told.get("type")),
        breaker=breaker if isinstance(breaker, str) and breaker in _BREAKERS else "",
        is_disabled=told.get("is_disabled") is True,
        used_bytes=_whole(told.get("used_bytes")),
        capacity_bytes=_whole(told.get("capacity_bytes")),
        budgets=dict(_budgets(_mapping(told.get("budgets")))),
        counts={
            (name, *map(clean, path)): number
            for name, labels in _COUNTERS.items()
            for path, told in islice(leaves(counters.get(name), labels), _LABELS_MAX)
            if len(path) == labels and (number := _number(told)) is not None
        },
        seconds=dict(_seconds(counters)),
    )


def _budgets(told: Mapping[object, object]) -> Iterator[tuple[str, tuple[int, int]]]:
    for direction in ("store", "load"):
        budget = _mapping(told.get(direction))
        used, limit = _whole(budget.get("used_bytes")), _whole(budget.get("limit_bytes"))
        if used is not None and limit is not None:
            yield direction, (used, limit)


def _seconds(counters: Mapping[object, object]) -> Iterator[tuple[str, Buckets]]:
    jobs = _mapping(counters.get("job_seconds"))
    histograms = {"load": jobs.get("load"), "store": jobs.get("store"), "step": counters.get("step_seconds")}
    for name, told in histograms.items():
        buckets: dict[float, float] = {}
        for bound, count in islice(_mapping(_mapping(told).get("buckets")).items(), _LABELS_MAX):
            largest = _bound(bound)
            number = _number(count)
            if largest is not None and number is not None:
                buckets[largest] = number
        if buckets:
            yield name, buckets


def _bound(text: object) -> float | None:
    if text == INFINITY:
        return math.inf
    try:
        bound = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        return None
    return bound if 0 < bound < _NUMBER_MAX else None


def _notices(told: object, now_s: float) -> Iterator[NoticeAnswer]:
    for each in told[-NOTICES_MAX:] if isinstance(told, list) else ():
        if isinstance(each, dict):
            age_s = max(0.0, now_s - (_number(each.get("time")) or 0.0))
            what, count = clean(each.get("what"), _TEXT_CHARACTERS_MAX), _whole(each.get("count")) or 1
            yield NoticeAnswer(age_s, clean(each.get("tier")), f"{what} ({count} times)" if count > 1 else what)


def _mapping(value: object) -> Mapping[object, object]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    """Return a number of something: finite, and not below zero."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _NUMBER_MAX:
        return float(value)
    return None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)
