"""A live view of a stack: the rates between two answers of its process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tiered_kv._cli.ask import Buckets, BudgetAnswer, Counters, NoticeAnswer, StatusAnswer, TierAnswer
from tiered_kv.errors import TieredKVError
from tiered_kv.metrics.instruments import quantile


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier over an interval; `docs/reference/command.md` describes each field."""

    name: str
    type: str
    breaker: str
    is_disabled: bool
    hits_per_s: float
    hit_share: float | None
    load_bytes_per_s: float
    store_bytes_per_s: float
    load_p99_seconds: float | None
    used_bytes: int | None
    capacity_bytes: int | None
    store_budget_used_bytes: int | None = None
    store_budget_bytes: int | None = None
    load_budget_used_bytes: int | None = None
    load_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReasonView:
    """A reason why blocks of a tier were not served, or not stored."""

    what: str
    """`miss`, `skip`, `load` or `store` (which failed), or `unexplained` (lookups too fast to explain)."""
    tier: str
    reason: str
    blocks_per_s: float
    blocks_total: int


@dataclass(frozen=True, slots=True)
class NoticeView:
    """A notice, `age_s` seconds before the answer; `what` has the number, if it is more than one."""

    age_s: float
    tier: str
    what: str


@dataclass(frozen=True, slots=True)
class View:
    """A stack over an interval; `docs/reference/command.md` describes each field."""

    version: str
    namespace: str
    pid: int
    uptime_seconds: float
    interval_seconds: float
    is_since_start: bool
    asked_blocks_per_s: float | None
    hit_share: float | None
    restored_tokens_per_s: float
    step_p99_seconds: float | None
    tiers: tuple[TierView, ...]
    reasons: tuple[ReasonView, ...]
    notices: tuple[NoticeView, ...]
    """The latest first."""

    @property
    def has_problem(self) -> bool:
        """Whether a tier is disabled, or its breaker is not closed."""
        return any(tier.is_disabled or tier.breaker not in ("", "closed") for tier in self.tiers)


def view_of(before: StatusAnswer | None, now: StatusAnswer) -> View:
    """Return the changes from one answer to the next; without the first, or after a restart, since the stack opened."""
    if before is not None and (before.pid != now.pid or before.uptime_seconds > now.uptime_seconds):
        before = None
    elapsed_s = max(now.uptime_seconds - (before.uptime_seconds if before else 0.0), 1e-3)
    earlier = {tier.name: tier.counters for tier in before.tiers} if before else {}
    changes = [_Change(tier, earlier.get(tier.name, Counters()), elapsed_s) for tier in now.tiers]
    hits = _hits(changes)
    asked = changes[0].asked_per_s()
    reasons = [reason for change in changes for reason in change.reasons()]
    return View(
        version=now.version,
        namespace=now.namespace,
        pid=now.pid,
        uptime_seconds=now.uptime_seconds,
        interval_seconds=elapsed_s,
        is_since_start=before is None,
        asked_blocks_per_s=asked,
        hit_share=min(1.0, sum(hits) / asked) if asked else None,
        restored_tokens_per_s=changes[0].per_s("restored_tokens_total"),
        step_p99_seconds=now.tiers[0].p99_seconds.get("step"),
        tiers=tuple(change.view(per_s) for change, per_s in zip(changes, hits, strict=True)),
        reasons=tuple(sorted(reasons, key=lambda each: (-each.blocks_per_s, -each.blocks_total))),
        notices=tuple(_notice(each, now.time) for each in sorted(now.notices, key=lambda each: -each.time)),
    )


def _hits(changes: list[_Change]) -> list[float]:
    """Return the hits of each tier, in blocks a second.

    Without a history these are the loaded blocks. The primary tier's include those that other tiers promoted.
    """
    if any(change.now.counters.blocks_total for change in changes):
        return [change.asked_for("hit") for change in changes]
    loaded = [change.per_s("loaded_blocks_total") for change in changes]
    return [max(0.0, loaded[0] - sum(loaded[1:])), *loaded[1:]]


def _notice(notice: NoticeAnswer, now_s: float) -> NoticeView:
    what = f"{notice.what} ({notice.count} times)" if notice.count > 1 else notice.what
    return NoticeView(max(0.0, now_s - notice.time), notice.tier, what)


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes of one tier's counters."""

    now: TierAnswer
    earlier: Counters
    elapsed_s: float

    def per_s(self, counter: str) -> float:
        return self._rate(getattr(self.now.counters, counter), getattr(self.earlier, counter))

    def asked_for(self, result: str) -> float:
        now, earlier = self.now.counters.blocks_total, self.earlier.blocks_total
        return self._rate(now.get(result, 0.0), earlier.get(result, 0.0))

    def asked_per_s(self) -> float | None:
        """Return the blocks that requests looked up in the tier; None without a history."""
        return self.asked_for("hit") + self.asked_for("miss") if self.now.counters.blocks_total else None

    def view(self, hits_per_s: float) -> TierView:
        now, asked = self.now, self.asked_per_s()
        store, load = now.budgets.get("store", BudgetAnswer()), now.budgets.get("load", BudgetAnswer())
        return TierView(
            name=now.name,
            type=now.type,
            breaker=now.breaker,
            is_disabled=now.is_disabled,
            hits_per_s=hits_per_s,
            hit_share=hits_per_s / asked if asked else None,
            load_bytes_per_s=self.per_s("loaded_bytes_total"),
            store_bytes_per_s=self.per_s("stored_bytes_total"),
            load_p99_seconds=self._load_p99(),
            used_bytes=now.used_bytes,
            capacity_bytes=now.capacity_bytes,
            store_budget_used_bytes=store.used_bytes,
            store_budget_bytes=store.limit_bytes,
            load_budget_used_bytes=load.used_bytes,
            load_budget_bytes=load.limit_bytes,
        )

    def reasons(self) -> list[ReasonView]:
        """Return the reasons that have blocks."""
        earlier = self.earlier.reasons
        return [
            ReasonView(what, self.now.name, reason, self._rate(total, earlier.get((what, reason), 0.0)), int(total))
            for (what, reason), total in self.now.counters.reasons.items()
        ]

    def _rate(self, now: float, earlier: float) -> float:
        return max(0.0, now - earlier) / self.elapsed_s

    def _load_p99(self) -> float | None:
        """Return the 99th percentile of the interval's loads."""
        now, earlier = (each.job_seconds.get("load", Buckets()).buckets for each in (self.now.counters, self.earlier))
        counts = {bound: max(0.0, count - earlier.get(bound, 0.0)) for bound, count in now.items()}
        return quantile({"count": sum(counts.values()), "buckets": counts}, 0.99)


@dataclass(frozen=True, slots=True)
class Sight:
    """The last view, and the error of the last request; empty after an answer."""

    view: View | None
    error: str = ""
    lost_s: float = 0.0
    """Seconds without an answer."""


class Watcher:
    """Views of a process from repeated requests. One thread uses it.

    Args:
        ask: Returns an answer, or raises a `TieredKVError`.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, ask: Callable[[], StatusAnswer], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._last: StatusAnswer | None = None
        self._view: View | None = None
        self._lost_since_s: float | None = None

    def look(self) -> Sight:
        """Ask once, and return the result."""
        began_s = self._clock()
        try:
            now = self._ask()
        except TieredKVError as error:
            self._lost_since_s = began_s if self._lost_since_s is None else self._lost_since_s
            return Sight(self._view, str(error), self._clock() - self._lost_since_s)
        self._view = view_of(self._last, now)
        self._last, self._lost_since_s = now, None
        return Sight(self._view)
