"""A live view of a stack: what two answers of its process say together, and what became of the process meanwhile."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tiered_kv.errors import TieredKVError
from tiered_kv.observe.answer import NOTICES_MAX, Buckets, NoticeAnswer, StatusAnswer, TierAnswer
from tiered_kv.observe.histogram import INFINITY, quantile

SERVER: Final = "server"
"""Stands for a tier's name in what the watcher notices itself."""


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
    """Why blocks were not served, or not stored, by one tier."""

    what: str
    """`miss`, `skip`, `load` or `store`: the last two have failed. `unexplained` was asked for too fast to count."""
    tier: str
    reason: str
    blocks_per_s: float
    blocks_total: int


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
    notices: tuple[NoticeAnswer, ...]
    """The latest first."""

    @property
    def is_troubled(self) -> bool:
        """Whether a tier is out of use, or its breaker is not closed."""
        return any(tier.is_disabled or tier.breaker not in ("", "closed") for tier in self.tiers)


def view_of(before: StatusAnswer | None, now: StatusAnswer) -> View:
    """Return what happened from one answer to the next; without the first, since the stack was opened.

    A process that was started in between has nothing to do with the first answer.
    """
    if before is not None and (before.pid != now.pid or before.uptime_s > now.uptime_s):
        before = None
    elapsed_s = max(now.uptime_s - (before.uptime_s if before else 0.0), 1e-3)
    earlier = {tier.name: tier for tier in before.tiers} if before else {}
    changes = [_Change(tier, earlier.get(tier.name), elapsed_s) for tier in now.tiers]
    hits = _hits(changes)
    asked = changes[0].asked_per_s() if changes else None
    reasons = [reason for change in changes for reason in change.reasons()]
    return View(
        version=now.version,
        namespace=now.namespace,
        pid=now.pid,
        uptime_seconds=now.uptime_s,
        interval_seconds=elapsed_s,
        is_since_start=before is None,
        asked_blocks_per_s=asked,
        hit_share=min(1.0, sum(hits) / asked) if asked else None,
        restored_tokens_per_s=changes[0].per_s("restored_tokens_total") if changes else 0.0,
        step_p99_seconds=_p99(now.tiers[0].seconds.get("step", {})) if changes else None,
        tiers=tuple(change.view(per_s) for change, per_s in zip(changes, hits, strict=True)),
        reasons=tuple(sorted(reasons, key=lambda each: (-each.blocks_per_s, -each.blocks_total))),
        notices=tuple(sorted(now.notices, key=lambda notice: notice.age_s)),
    )


def _hits(changes: list[_Change]) -> list[float]:
    """Return the hits of each tier, in blocks a second.

    Without a history the loaded blocks stand for them. The primary tier's loads then include what others promoted.
    """
    if any(change.has("blocks_total") for change in changes):
        return [change.per_s("blocks_total", "hit") for change in changes]
    loaded = [change.per_s("loaded_blocks_total") for change in changes]
    return [max(0.0, loaded[0] - sum(loaded[1:])), *loaded[1:]] if loaded else []


class _Change:
    """How one tier's counts changed."""

    def __init__(self, now: TierAnswer, before: TierAnswer | None, elapsed_s: float) -> None:
        self._now = now
        self._earlier = before
        self._elapsed_s = elapsed_s

    def has(self, name: str) -> bool:
        return any(path[0] == name for path in self._now.counts)

    def per_s(self, *path: str) -> float:
        earlier = self._earlier.counts.get(path, 0.0) if self._earlier else 0.0
        return max(0.0, self._now.counts.get(path, 0.0) - earlier) / self._elapsed_s

    def asked_per_s(self) -> float | None:
        """Return the blocks that requests looked up in the tier; None where nobody counts them."""
        asked = self.per_s("blocks_total", "hit") + self.per_s("blocks_total", "miss")
        return asked if self.has("blocks_total") else None

    def view(self, hits_per_s: float) -> TierView:
        now, asked = self._now, self.asked_per_s()
        store, load = now.budgets.get("store", (None, None)), now.budgets.get("load", (None, None))
        return TierView(
            name=now.name,
            type=now.type,
            breaker=now.breaker,
            is_disabled=now.is_disabled,
            hits_per_s=hits_per_s,
            hit_share=hits_per_s / asked if asked else None,
            load_bytes_per_s=self.per_s("loaded_bytes_total"),
            store_bytes_per_s=self.per_s("stored_bytes_total"),
            load_p99_seconds=_p99(self._loads()),
            used_bytes=now.used_bytes,
            capacity_bytes=now.capacity_bytes,
            store_budget_used_bytes=store[0],
            store_budget_bytes=store[1],
            load_budget_used_bytes=load[0],
            load_budget_bytes=load[1],
        )

    def reasons(self) -> list[ReasonView]:
        """Return why blocks did not come, or were not stored; a reason that has no block yet is left out."""
        found = []
        for path, total in self._now.counts.items():
            match path:
                case ("misses_total", reason):
                    what = "miss"
                case ("unexplained_blocks_total",):
                    what, reason = "unexplained", "too fast"
                case ("skipped_blocks_total", reason):
                    what = "skip"
                case ("failed_blocks_total", direction, reason):
                    what = direction
                case _:
                    continue
            if total:
                found.append(ReasonView(what, self._now.name, reason, self.per_s(*path), int(total)))
        return found

    def _loads(self) -> Buckets:
        """Return the histogram of the loads of the interval alone."""
        earlier = self._earlier.seconds.get("load", {}) if self._earlier else {}
        now = self._now.seconds.get("load", {})
        return {bound: max(0.0, count - earlier.get(bound, 0.0)) for bound, count in now.items()}


def _p99(buckets: Buckets) -> float | None:
    named = {INFINITY if bound == math.inf else repr(bound): buckets[bound] for bound in sorted(buckets)}
    return quantile({"count": sum(named.values()), "buckets": named}, 0.99)


@dataclass(frozen=True, slots=True)
class Sight:
    """What a watcher knows after it has asked: the last view, and why there is no newer one."""

    view: View | None
    trouble: str = ""
    """Why there is no answer now; empty if there is one."""
    lost_s: float = 0.0
    """How long there has been none."""


class Watcher:
    """Asks a process again and again, and puts its answers together. One thread uses it.

    Args:
        ask: Returns an answer, or raises a `TieredKVError` that says why there is none.
        clock: Seconds that only grow.
    """

    def __init__(self, ask: Callable[[], StatusAnswer], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._last: StatusAnswer | None = None
        self._view: View | None = None
        self._viewed_s = 0.0
        self._lost_since_s: float | None = None
        self._noticed: deque[tuple[float, str]] = deque(maxlen=NOTICES_MAX)

    def look(self) -> Sight:
        """Ask once, and return what is known then."""
        began_s = self._clock()
        try:
            now = self._ask()
        except TieredKVError as error:
            return self._without_answer(str(error), began_s)
        self._note_changes(now)
        self._view, self._viewed_s = view_of(self._last, now), self._clock()
        self._last, self._lost_since_s = now, None
        return Sight(self._shown())

    def _without_answer(self, trouble: str, began_s: float) -> Sight:
        if self._lost_since_s is None:
            self._lost_since_s = began_s
            self._noticed.append((began_s, f"does not answer: {trouble}"))
        return Sight(self._shown(), trouble, self._clock() - self._lost_since_s)

    def _note_changes(self, now: StatusAnswer) -> None:
        now_s, last = self._clock(), self._last
        if self._lost_since_s is not None:
            self._noticed.append((now_s, f"answers again, after {now_s - self._lost_since_s:.0f} s"))
        if last is not None and (last.pid != now.pid or last.uptime_s > now.uptime_s):
            self._noticed.append((now_s, f"another stack answers now: process {now.pid}, before it {last.pid}"))

    def _shown(self) -> View | None:
        """Return the last view, with what was noticed here, as old as it all is now."""
        if self._view is None:
            return None
        now_s = self._clock()
        passed_s = now_s - self._viewed_s
        theirs = [replace(notice, age_s=notice.age_s + passed_s) for notice in self._view.notices]
        ours = [NoticeAnswer(now_s - at_s, SERVER, what) for at_s, what in self._noticed]
        return replace(self._view, notices=tuple(sorted([*theirs, *ours], key=lambda notice: notice.age_s)))
