"""Requests over HTTP to a process that has a stack open, and the changes from one of its answers to the next.

`top`, `why`, `doctor` and `purge` call it, and wait for the answer. Nothing here keeps a state. The process may run
another version, or have no stack. What must stay true: each status is checked, and no answer is larger than a limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from tiered_kv.cli.output import printable
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.stack_config import MetricsSettings
from tiered_kv.config.validation import validate
from tiered_kv.errors import ConfigError, FormatError
from tiered_kv.metrics.histogram import quantile
from tiered_kv.metrics.metric import TOTAL, Metric
from tiered_kv.metrics.vocabulary import MANAGER
from tiered_kv.stack.exporters.client import (
    ANSWER_BYTES_MAX,
    DEFAULT_ADDRESS,
    bearer,
    fetch,
    is_address,
    url_of_address,
)

TOKEN: Final = "TIERED_KV_TOKEN"
"""The variable whose token the command sends with a change."""
__all__ = ["ANSWER_BYTES_MAX", "DEFAULT_ADDRESS", "fetch", "is_address", "read_status", "token_of", "url_of", "view_of"]

_LINE: Final = f'metrics: {{listen: "{DEFAULT_ADDRESS}"}}'


def url_of(text: str) -> str:
    """Return the URL without a page, for a URL, HOST:PORT, or the path of a stack's file with `metrics.listen`.

    Of a stack's file it reads only `metrics`. So the environment variables of its secrets need not be set here.

    Raises:
        ConfigError: `text` is none of these, or the file has no `metrics.listen`.
    """
    return url_of_address(text) if is_address(text) else from_source(text, _url_of_stack)


def token_of(text: str) -> dict[str, str]:
    """Return the header that a change needs: with the variable `TOKEN`, or `metrics.token` of a stack's file `text`.

    Raises:
        ConfigError: It is a token that no header can hold.
    """
    if given := os.environ.get(TOKEN):
        return bearer(given, location=TOKEN)
    token = None if is_address(text) else from_source(text, _metrics_of).token
    return {} if token is None else bearer(token.get_secret_value(), location="metrics.token")


def _url_of_stack(raw: Mapping[str, object]) -> str:
    if raw.get("metrics") is None:
        raise ConfigError(
            f"the stack serves no status; add this line to the file, and open the stack anew: {_LINE}",
            location="metrics.listen",
        )
    metrics = _metrics_of(raw)
    if metrics.address[1] == 0:
        raise ConfigError("no server listens at port 0: give the URL with the port that the process has taken")
    return f"http://{metrics.listen}"


def _metrics_of(raw: Mapping[str, object]) -> MetricsSettings:
    filled = fill_variables({"metrics": raw["metrics"]}, os.environ)
    return validate(MetricsSettings, filled["metrics"], ("metrics",))


def _flat(counters: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the path (name and labels) and value of each counter, and of each part of a histogram, unless None."""
    if isinstance(counters, dict):
        for name, value in counters.items():
            yield from _flat(value, (*path, printable(str(name))))
    elif counters is not None:
        if not isinstance(counters, (int, float)) or not 0 <= counters <= _NUMBER_MAX:
            raise ValueError("expected a number")
        yield path, counters


_NUMBER_MAX: Final = 10**24
_Text = Annotated[str, AfterValidator(printable)]
_Number = Annotated[float, Field(strict=True, ge=0, le=_NUMBER_MAX)]
_Whole = Annotated[int | None, Field(strict=True, ge=0, le=_NUMBER_MAX)]
_Counters = Annotated[dict[tuple[str, ...], float], BeforeValidator(lambda counters: dict(_flat(counters)))]


class BudgetState(BaseModel):
    used_bytes: _Whole = None
    limit_bytes: _Whole = None


class MetricState(BaseModel):
    """A metric, as a tier's type declares it."""

    help: _Text
    unit: _Text
    labels: Annotated[list[_Text], Field(max_length=4)]


@dataclass(frozen=True, slots=True)
class Count:
    """Identifies a number of a tier: a counter with its labels, or a bucket of a histogram."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    """Names and values of the labels."""
    bucket: str = ""
    is_own: bool = False
    """Whether the tier itself counts it, not the manager."""

    def label(self, name: str) -> str:
        """Return the value of a label; empty if it has none."""
        return dict(self.labels).get(name, "")


class TierStatus(BaseModel):
    name: _Text
    type: _Text
    breaker: Literal["", "closed", "half_open", "open"]
    is_disabled: bool
    removal: Literal["", "draining", "drained", "attaching"] = ""
    note: _Text = ""
    used_bytes: _Whole
    capacity_bytes: _Whole
    budgets: dict[str, BudgetState] = {}
    p99_seconds: dict[str, _Number | None] = {}
    metrics: dict[_Text, MetricState] = {}
    counters: _Counters

    def counts(self) -> dict[Count, float]:
        """Return the numbers whose meaning this version knows, or which the tier's type declares."""
        of_paths = (
            (self._count(path), number) for path, number in self.counters.items() if path not in ((), ("tier",))
        )
        return {count: number for count, number in of_paths if count is not None}

    def _count(self, path: tuple[str, ...]) -> Count | None:
        """Return the identity of the number at a path (name, values of labels, part of a histogram), if it is known."""
        is_own = path[0] == "tier"
        name, *values = path[1:] if is_own else path
        known: Mapping[str, Metric | MetricState] = self.metrics if is_own else MANAGER
        if name not in known:
            return None
        labels = known[name].labels
        named = tuple(zip(labels, values, strict=False))
        match values[len(labels) :]:
            case [] if len(values) == len(labels):
                return Count(name, named, is_own=is_own)
            case ["buckets", bucket]:
                return Count(name, named, bucket, is_own)
        return None


class Notice(BaseModel):
    time: _Number
    tier: _Text
    what: _Text
    count: _Whole = 1


class StackStatus(BaseModel):
    """The answer to `/status`, which `docs/how-to/metrics.md` describes. Its texts are printable."""

    version: _Text
    namespace: _Text
    block_bytes: _Whole = None
    pid: Annotated[int, Field(strict=True, ge=0, le=_NUMBER_MAX)]
    uptime_seconds: _Number
    time: _Number
    tiers: Annotated[list[TierStatus], Field(min_length=1)]
    notices: list[Notice]


def read_status(body: bytes) -> StackStatus:
    """Return the answer to `/status`; raise `FormatError` if it is not the status of a stack."""
    try:
        return StackStatus.model_validate_json(body)
    except (ValidationError, RecursionError):
        raise FormatError("the answer is not the status of a stack") from None


View = dict[str, Any]  # Any: as JSON has it
"""A stack over an interval, as `--json` prints it; `docs/reference/command.md` describes each field."""


def view_of(before: StackStatus | None, now: StackStatus) -> View:
    """Return the changes from one answer to the next; without `before`, or after a restart, all since the opening."""
    if before and (before.pid != now.pid or before.uptime_seconds > now.uptime_seconds):
        before = None
    elapsed_s = max(now.uptime_seconds - (before.uptime_seconds if before else 0.0), 1e-3)
    earlier = {tier.name: tier.counts() for tier in before.tiers} if before else {}
    changes = [_Change(tier, earlier.get(tier.name, {}), elapsed_s) for tier in now.tiers]
    if any(change.asked_per_s is not None for change in changes):
        hits = [change.per_s("blocks_total", result="hit") for change in changes]
    else:  # loaded blocks stand for hits; the primary tier's include the promotions from other tiers
        first, *others = (change.per_s("loaded_blocks_total") for change in changes)
        hits = [max(0.0, first - sum(others)), *others]
    asked = changes[0].asked_per_s
    reasons = [reason for change in changes for reason in change.reasons()]
    notices = [
        {
            "age_s": max(0.0, now.time - each.time),
            "tier": each.tier,
            "what": each.what + (f" ({each.count} times)" if (each.count or 0) > 1 else ""),
        }
        for each in now.notices
    ]
    return {
        "version": now.version,
        "namespace": now.namespace,
        "pid": now.pid,
        "uptime_seconds": now.uptime_seconds,
        "interval_seconds": elapsed_s,
        "is_since_start": before is None,
        "asked_blocks_per_s": asked,
        "hit_share": min(1.0, sum(hits) / asked) if asked else None,
        "restored_tokens_per_s": changes[0].per_s("restored_tokens_total"),
        "step_p99_seconds": now.tiers[0].p99_seconds.get("step"),
        "tiers": [change.view(per_s) for change, per_s in zip(changes, hits, strict=True)],
        "reasons": sorted(reasons, key=lambda each: (-each["blocks_per_s"], -each["blocks_total"])),
        "notices": sorted(notices, key=lambda each: float(str(each["age_s"]))),
    }


class _Change:
    """The changes of one tier's counters since `earlier`."""

    def __init__(self, now: TierStatus, earlier: Mapping[Count, float], elapsed_s: float) -> None:
        self._now = now
        self._counts = now.counts()
        self._grown = {count: max(0.0, number - earlier.get(count, 0)) for count, number in self._counts.items()}
        self._elapsed_s = elapsed_s

    def per_s(self, name: str, **labels: str) -> float:
        return self._grown.get(Count(name, tuple(labels.items())), 0.0) / self._elapsed_s

    @property
    def asked_per_s(self) -> float | None:
        """The blocks that requests looked up in the tier; None without a history."""
        if not any(count.name == "blocks_total" for count in self._grown):
            return None
        return self.per_s("blocks_total", result="hit") + self.per_s("blocks_total", result="miss")

    def view(self, hits_per_s: float) -> View:
        asked = self.asked_per_s
        fields = {"name", "type", "breaker", "is_disabled", "removal", "note", "used_bytes", "capacity_bytes"}
        budgets = {name: self._now.budgets.get(name, BudgetState()) for name in ("store", "load")}
        return {
            **self._now.model_dump(include=fields),
            "hits_per_s": hits_per_s,
            "hit_share": hits_per_s / asked if asked else None,
            "load_bytes_per_s": self.per_s("loaded_bytes_total"),
            "store_bytes_per_s": self.per_s("stored_bytes_total"),
            "load_p99_seconds": self._load_p99(),
            **{f"{name}_budget_used_bytes": budget.used_bytes for name, budget in budgets.items()},
            **{f"{name}_budget_bytes": budget.limit_bytes for name, budget in budgets.items()},
            "own": list(self._own()),
        }

    def reasons(self) -> Iterator[View]:
        """Yield the reasons why blocks did not come, or were not stored."""
        kinds = {"misses_total": "miss", "skipped_blocks_total": "skip", "unexplained_blocks_total": "unexplained"}
        for count, number in self._counts.items():
            if number and not count.is_own and count.name in (*kinds, "failed_blocks_total"):
                yield {
                    "what": kinds.get(count.name) or count.label("direction"),
                    "tier": self._now.name,
                    "reason": count.label("reason") or "too fast",
                    "blocks_per_s": self._grown[count] / self._elapsed_s,
                    "blocks_total": int(number),
                }

    def _own(self) -> Iterator[View]:
        """Yield the metrics that the tier counts itself and its type declares."""
        for count, number in self._counts.items():
            if count.is_own and not count.bucket:
                metric = self._now.metrics[count.name]
                yield {
                    "name": count.name,
                    "labels": dict(count.labels),
                    "value": number,
                    "per_s": self._grown[count] / self._elapsed_s if count.name.endswith(TOTAL) else None,
                    "unit": metric.unit,
                    "help": metric.help,
                }

    def _load_p99(self) -> float | None:
        """Return the 99th percentile of the interval's loads."""
        loads = {count: grown for count, grown in self._grown.items() if count.name == "job_seconds" and count.bucket}
        counts = {count.bucket: grown for count, grown in loads.items() if count.label("direction") == "load"}
        try:
            return quantile({"count": sum(counts.values()), "buckets": counts}, 0.99)
        except ValueError:
            raise FormatError("the answer is not the status of a stack") from None
