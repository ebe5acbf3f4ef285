"""A live view of a stack: the rates between two answers of its process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tiered_kv._cli.output import printable
from tiered_kv.errors import FormatError, TieredKVError
from tiered_kv.metrics.instruments import quantile

_NUMBER_MAX: Final = 10**24
_BREAKERS: Final = ("", "closed", "half_open", "open")


class Fields:
    """The fields of an object in a process's answer. A wrong type raises `FormatError`; texts are printable."""

    def __init__(self, found: object = None) -> None:
        if not isinstance(found, dict | None):
            raise _refusal()
        self._found = found or {}

    def names(self) -> list[str]:
        return list(self._found)

    def optional(self, name: str) -> float | None:
        number = self._found.get(name)
        if number is not None and (type(number) not in (int, float) or not 0 <= number <= _NUMBER_MAX):
            raise _refusal()
        return number

    def number(self, name: str) -> float:
        return self.optional(name) or 0

    def whole(self, name: str) -> int | None:
        number = self.optional(name)
        return None if number is None else int(number)

    def text(self, name: str) -> str:
        text = self._found.get(name, "")
        if not isinstance(text, str):
            raise _refusal()
        return printable(text)

    def is_true(self, name: str) -> bool:
        return self._found.get(name) is True

    def inner(self, name: str) -> Fields:
        return Fields(self._found.get(name))

    def each(self, name: str) -> list[Fields]:
        found = self._found.get(name, [])
        if not isinstance(found, list):
            raise _refusal()
        return [Fields(each) for each in found]


def read_status(body: bytes) -> Fields:
    """Return the fields of an answer; raise `FormatError` if it is not the status of a stack."""
    try:
        status = Fields(json.loads(body))
    except (ValueError, RecursionError):
        raise _refusal() from None
    if not status.each("tiers"):
        raise _refusal()
    return status


def _refusal() -> FormatError:
    return FormatError("the answer is not the status of a stack")


View = dict[str, Any]  # Any: as JSON has it
"""A stack over an interval, as `--json` prints it; `docs/reference/command.md` describes each field."""


def has_problem(view: View) -> bool:
    """Return whether a tier is disabled, or its breaker is not closed."""
    return any(tier["is_disabled"] or tier["breaker"] not in ("", "closed") for tier in view["tiers"])


def view_of(before: Fields | None, now: Fields) -> View:
    """Return the changes from one answer to the next; without the first, or after a restart, since the stack opened.

    Raises:
        FormatError: The answer is not the status of a stack.
    """
    uptime_s = now.number("uptime_seconds")
    if before and (before.number("pid") != now.number("pid") or before.number("uptime_seconds") > uptime_s):
        before = None
    elapsed_s = max(uptime_s - (before.number("uptime_seconds") if before else 0.0), 1e-3)
    earlier = {each.text("name"): each.inner("counters") for each in before.each("tiers")} if before else {}
    changes = [_Change(each, earlier.get(each.text("name"), Fields()), elapsed_s) for each in now.each("tiers")]
    hits = _hits(changes)
    asked = changes[0].asked_per_s()
    reasons = [reason for change in changes for reason in change.reasons()]
    notices = [_notice(each, now.number("time")) for each in now.each("notices")]
    return {
        "version": now.text("version"),
        "namespace": now.text("namespace"),
        "pid": int(now.number("pid")),
        "uptime_seconds": uptime_s,
        "interval_seconds": elapsed_s,
        "is_since_start": before is None,
        "asked_blocks_per_s": asked,
        "hit_share": min(1.0, sum(hits) / asked) if asked else None,
        "restored_tokens_per_s": changes[0].per_s("restored_tokens_total"),
        "step_p99_seconds": now.each("tiers")[0].inner("p99_seconds").optional("step"),
        "tiers": [change.view(per_s) for change, per_s in zip(changes, hits, strict=True)],
        "reasons": sorted(reasons, key=lambda each: (-each["blocks_per_s"], -each["blocks_total"])),
        "notices": sorted(notices, key=lambda each: float(each["age_s"])),
    }


def _hits(changes: list[_Change]) -> list[float]:
    """Return the hits of each tier, in blocks a second.

    Without a history these are the loaded blocks. The primary tier's include those that other tiers promoted.
    """
    if any(change.has_history for change in changes):
        return [change.asked_for("hit") for change in changes]
    loaded = [change.per_s("loaded_blocks_total") for change in changes]
    return [max(0.0, loaded[0] - sum(loaded[1:])), *loaded[1:]]


def _notice(notice: Fields, now_s: float) -> View:
    count = f" ({notice.whole('count')} times)" if notice.number("count") > 1 else ""
    age_s = max(0.0, now_s - notice.number("time"))
    return {"age_s": age_s, "tier": notice.text("tier"), "what": notice.text("what") + count}


class _Change:
    """The changes of one tier's counters since `earlier`."""

    def __init__(self, now: Fields, earlier: Fields, elapsed_s: float) -> None:
        self._now, self._counters, self._earlier, self._elapsed_s = now, now.inner("counters"), earlier, elapsed_s
        self._name = now.text("name")
        self.has_history = bool(self._counters.inner("blocks_total").names())

    def per_s(self, counter: str) -> float:
        return self._rate(self._counters, self._earlier, counter)

    def asked_for(self, result: str) -> float:
        return self._rate(self._counters.inner("blocks_total"), self._earlier.inner("blocks_total"), result)

    def asked_per_s(self) -> float | None:
        """Return the blocks that requests looked up in the tier; None without a history."""
        return self.asked_for("hit") + self.asked_for("miss") if self.has_history else None

    def view(self, hits_per_s: float) -> View:
        now, asked = self._now, self.asked_per_s()
        breaker, budgets = now.text("breaker"), now.inner("budgets")
        if breaker not in _BREAKERS:
            raise _refusal()
        return {
            "name": self._name,
            "type": now.text("type"),
            "breaker": breaker,
            "is_disabled": now.is_true("is_disabled"),
            "hits_per_s": hits_per_s,
            "hit_share": hits_per_s / asked if asked else None,
            "load_bytes_per_s": self.per_s("loaded_bytes_total"),
            "store_bytes_per_s": self.per_s("stored_bytes_total"),
            "load_p99_seconds": self._load_p99(),
            "used_bytes": now.whole("used_bytes"),
            "capacity_bytes": now.whole("capacity_bytes"),
            "store_budget_used_bytes": budgets.inner("store").whole("used_bytes"),
            "store_budget_bytes": budgets.inner("store").whole("limit_bytes"),
            "load_budget_used_bytes": budgets.inner("load").whole("used_bytes"),
            "load_budget_bytes": budgets.inner("load").whole("limit_bytes"),
        }

    def reasons(self) -> Iterator[View]:
        """Yield the reasons why blocks did not come, or were not stored."""
        paths = [("miss", ["misses_total"]), ("skip", ["skipped_blocks_total"])]
        paths += [(each, ["failed_blocks_total", each]) for each in self._counters.inner("failed_blocks_total").names()]
        for what, path in paths:
            now, earlier = self._counters, self._earlier
            for part in path:
                now, earlier = now.inner(part), earlier.inner(part)
            yield from (self._reason(what, each, now, earlier, each) for each in now.names() if now.number(each))
        if self._counters.number("unexplained_blocks_total"):
            yield self._reason("unexplained", "too fast", self._counters, self._earlier, "unexplained_blocks_total")

    def _reason(self, what: str, reason: str, now: Fields, earlier: Fields, name: str) -> View:
        per_s, total = self._rate(now, earlier, name), int(now.number(name))
        about = {"what": printable(what), "tier": self._name, "reason": printable(reason)}
        return {**about, "blocks_per_s": per_s, "blocks_total": total}

    def _rate(self, now: Fields, earlier: Fields, name: str) -> float:
        return max(0.0, now.number(name) - earlier.number(name)) / self._elapsed_s

    def _load_p99(self) -> float | None:
        """Return the 99th percentile of the interval's loads."""
        now, earlier = (
            each.inner("job_seconds").inner("load").inner("buckets") for each in (self._counters, self._earlier)
        )
        try:
            counts = {float(each): max(0.0, now.number(each) - earlier.number(each)) for each in now.names()}
        except ValueError:
            raise _refusal() from None
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

    def __init__(self, ask: Callable[[], Fields], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._last: Fields | None = None
        self._view: View | None = None
        self._lost_since_s: float | None = None

    def look(self) -> Sight:
        """Ask once, and return the result."""
        began_s = self._clock()
        try:
            now = self._ask()
            view = view_of(self._last, now)
        except TieredKVError as error:
            self._lost_since_s = began_s if self._lost_since_s is None else self._lost_since_s
            return Sight(self._view, str(error), self._clock() - self._lost_since_s)
        self._view, self._last, self._lost_since_s = view, now, None
        return Sight(self._view)
