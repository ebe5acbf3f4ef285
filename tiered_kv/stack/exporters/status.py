"""The status of a stack, as JSON; and why a block was a miss, for programs and for `tiered-kv why`.

The HTTP server's threads call it, and any thread of a program. It reads snapshots, and shows no secret.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

from tiered_kv.base import OffloadKey
from tiered_kv.config.secrets import scrub
from tiered_kv.config.settings import PRIMARY_NAME, TierSettings
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.histogram import HistogramValue, quantile
from tiered_kv.metrics.history.ledger import CPU, REQUEST_ID_CHARACTERS_MAX, EndedRequest
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.metrics.own import OwnStats, is_finite
from tiered_kv.metrics.series import Snapshot, TierSeries
from tiered_kv.metrics.vocabulary import DIRECTIONS
from tiered_kv.reasons import PRESENT, Fate
from tiered_kv.stack.exporters.metrics import safe_label
from tiered_kv.system.step import give_way
from tiered_kv.tiering.breaker import BreakerState
from tiered_kv.tiering.manager import TieringOffloadingManager

KEYS_MAX: Final = 1024
"""Keys, or requests, in one query."""
REQUESTS_SHOWN: Final = 16
"""Limit of the last requests in a status."""
_SETTLED_KEYS_MAX: Final = 512
"""Keys that a status takes from the history's queue, at most. It is asked for often: the next one shows the rest."""
_SLICE: Final = 32
"""Keys that are described without a pause. They hold the interpreter lock for some 100 microseconds."""
_Item = TypeVar("_Item")


def status(stack: Observed, *, with_errors: bool = False) -> dict[str, Any]:  # Any: as JSON has it
    """Return the status of a stack; `docs/how-to/metrics.md` describes the fields. Any thread may call.

    It has no key, path, address or setting, except for the names of tiers, the namespace's digest, and the ids of
    requests. `with_errors` adds why a tier cannot be opened or its breaker opened, with its path or address.
    """
    config, snapshot = stack.config, stack.snapshot()
    disabled, removed = stack.manager.disabled_tiers(), stack.manager.removed_tiers()
    notes = stack.manager.removals.notes(with_errors=with_errors)
    tiers = [_primary(snapshot.tiers[PRIMARY_NAME])]
    for tier in config.secondary:
        secrets = config.secret_texts()
        found = _secondary(tier, snapshot.tiers[tier.name], tier.name in disabled, secrets)
        note = scrub(notes.get(tier.name, ""), secrets)
        tiers.append({**found, "removal": removed.get(tier.name, ""), "note": note})
    return {
        "version": version("tiered-kv"),
        "namespace": config.identity.digest.hex(),
        "block_bytes": config.block.bytes,
        "pid": os.getpid(),
        "uptime_seconds": time.monotonic() - stack.opened_s,
        "time": time.time(),
        "tiers": tiers,
        "requests": _last_requests(stack),
        "notices": stack.manager.notices.snapshot(),
    }


def _last_requests(stack: Observed) -> list[dict[str, object]]:
    """Return what the last requests got, the latest first; nothing without a history."""
    if stack.history is None:
        return []
    ended = stack.history.requests(_SETTLED_KEYS_MAX)[: -REQUESTS_SHOWN - 1 : -1]
    return [
        {"age_seconds": stack.history.age_s(each), **received_by(each, stack.config.block.tokens)} for each in ended
    ]


def received_by(request: EndedRequest, block_tokens: int) -> dict[str, object]:
    """Return what a request got, as JSON: blocks by tier, their tokens, what it computed instead, and its wait."""
    return {
        "request": request.req_id,
        "blocks": dict(request.hits),
        "tokens": {tier: count * block_tokens for tier, count in request.token_hits.items() if block_tokens},
        "missed_blocks": request.missed_blocks,
        "missed_tokens": max(request.missed_groups.values(), default=0) * block_tokens,
        "waited_seconds": request.waited_s,
    }


def _primary(counted: TierSeries) -> dict[str, Any]:
    return {
        "name": PRIMARY_NAME,
        "type": PRIMARY_NAME,
        "breaker": "",
        "is_disabled": False,
        "used_bytes": counted.value("used_bytes"),
        "capacity_bytes": counted.value("capacity_bytes"),
        **_quantiles({"step": counted.value("step_seconds")}),
        "counters": counted.nested(),
    }


def _secondary(settings: TierSettings, counted: TierSeries, is_disabled: bool, secrets: set[str]) -> dict[str, Any]:
    own = counted.own or OwnStats({}, {})
    seconds = {direction: counted.value("job_seconds", direction) for direction in DIRECTIONS}
    return {
        "name": settings.name,
        "type": safe_label(settings.type, secrets),
        "breaker": BreakerState(counted.value("breaker_state")).name.lower(),
        "is_disabled": is_disabled,
        "used_bytes": _whole(own.number("used_bytes")),
        "capacity_bytes": _whole(own.number("capacity_bytes")),
        "budgets": {
            direction: {
                "used_bytes": counted.value(f"{direction}_budget_used_bytes"),
                "limit_bytes": counted.value(f"{direction}_budget_bytes"),
            }
            for direction in DIRECTIONS
        },
        **_quantiles({**seconds, "lookup": counted.value("lookup_seconds")}),
        "counters": {**counted.nested(), "tier": _plain(own, secrets)},
        "metrics": {
            name: {"help": metric.help, "unit": metric.unit, "labels": list(metric.labels)}
            for name, metric in own.metrics.items()
            if name in own.stats
        },
    }


def _quantiles(histograms: Mapping[str, HistogramValue]) -> dict[str, dict[str, float | None]]:
    return {
        f"p{percent}_seconds": {name: quantile(histogram, percent / 100) for name, histogram in histograms.items()}
        for percent in (50, 99)
    }


def _plain(own: OwnStats, secrets: set[str]) -> dict[str, Any]:
    """Return a tier's own counters, with plain words and numbers only."""
    shown: dict[str, Any] = {}
    for number in own:
        *above, last = (safe_label(text, secrets) for text in (number.name, *number.labels))
        inner = shown
        for label in above:
            found = inner.setdefault(label, {})
            inner = found if isinstance(found, dict) else {}
        value = number.value
        inner[last] = value if isinstance(value, dict) else number.given if is_finite(number.given) else None
    return shown


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


@dataclass(frozen=True, slots=True)
class TierFate:
    """The fate of a block in one tier."""

    tier: str
    fate: str
    """"present" (the primary tier has it), "stored", "unknown", or the reason for a miss as in `misses_total`."""
    age_s: float | None  # seconds since the fate was noted; None for "present" and "unknown"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The fate of a block in each tier, in the order of the search. `key` is the key that the caller gave."""

    key: bytes
    tiers: tuple[TierFate, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """The parts of a stack that this package reads."""

    config: StackConfig
    history: BlockHistory | None
    manager: TieringOffloadingManager
    opened_s: float
    """When the stack was opened, in seconds of `time.monotonic`."""
    snapshot: Callable[[], Snapshot]
    limits_path: Path | None = None
    """Where changed limits of tenants are kept; None if they end with the process."""


def explain(history: BlockHistory, rows: PrimaryRows, keys: Sequence[OffloadKey]) -> list[Explanation]:
    """Return the fates of each block; any thread may call. It reads keys of `rows`, the primary tier's."""
    found = []
    for key, fates in _in_slices(zip(keys, history.fates(keys), strict=True)):
        tiers = [
            TierFate(name, fate.label, None if fate is Fate.UNKNOWN else age_s)
            for name, (fate, age_s) in zip(history.names, fates, strict=True)
        ]
        if rows.row_of(key) is not None:
            tiers[CPU] = TierFate(history.names[CPU], PRESENT, None)
        found.append(Explanation(key, tuple(tiers)))
    return found


def explain_query(stack: Observed, query: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Answer `/explain?key=HEX&key=HEX`, `/explain?request=ID` or `/explain?last=N`; any thread may call.

    `query` is a result of `urllib.parse.parse_qs`. `last` asks for the last N requests that missed a block. Returns the
    JSON that `docs/reference/command.md` describes.

    Raises:
        ConfigError: The stack has no history, or the query is invalid.
    """
    if stack.history is None:
        raise ConfigError("the stack keeps no history: its setting 'history' is 0", location="history")
    if unknown := query.keys() - {"key", "request", "last", "namespace"}:
        raise ConfigError(f"expected 'key', 'request' or 'last', found {sorted(unknown)}")
    keys = [_key(text) for text in query.get("key", [])]
    wanted = query.get("request", [])
    last = sum(_count(text) for text in query.get("last", []))
    if max(len(keys), len(wanted), last) > KEYS_MAX:
        raise ConfigError(f"expected at most {KEYS_MAX} keys and requests")
    req_ids = frozenset(each[:REQUEST_ID_CHARACTERS_MAX] for each in wanted)
    requests = _chosen(stack.history.requests() if wanted or last else [], req_ids, last)
    return {
        "namespace": stack.config.identity.digest.hex(),
        "tiers": list(stack.history.names),
        "keys": list(_in_slices(map(_described, explain(stack.history, stack.manager.primary, keys)))),
        "requests": list(_in_slices(_described_request(stack, stack.history, request) for request in requests)),
        "estimates": stack.manager.estimates(),
        "unexplained_blocks_total": stack.history.dropped_blocks,
    }


def _chosen(ended: Sequence[EndedRequest], req_ids: frozenset[str], last: int) -> list[EndedRequest]:
    """Return the last request of each id, and the last ones that missed a block; the latest first.

    A host's server puts an engine's name and a number before the ids of its requests.
    """
    endings = tuple(f"/{each}" for each in req_ids)
    by_id = {each.req_id: each for each in ended if each.req_id in req_ids or each.req_id.endswith(endings)}
    missed = [request for request in reversed(ended) if request.missed_blocks][:last]
    return sorted({id(each): each for each in (*by_id.values(), *missed)}.values(), key=lambda each: -each.ended_s)


def _described(explanation: Explanation) -> dict[str, object]:
    return {
        "key": explanation.key.hex(),
        "tiers": {each.tier: {"fate": each.fate, "age_seconds": each.age_s} for each in explanation.tiers},
    }


def _described_request(stack: Observed, history: BlockHistory, request: EndedRequest) -> dict[str, object]:
    first = [] if request.first_missed is None else [request.first_missed]
    found = explain(history, stack.manager.primary, first)
    return {
        "request": request.req_id,
        "age_seconds": history.age_s(request),
        "hits": dict(request.hits),
        "misses": {tier: dict(reasons) for tier, reasons in request.misses.items()},
        "missed_blocks": request.missed_blocks,
        "missed_groups": dict(request.missed_groups),
        "first_missed": _described(found[0]) if found else None,
        "first_missed_because": dict(request.first_because),
    }


def _in_slices(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, and let a scheduler's step go first before each `_SLICE`."""
    for number, item in enumerate(items):
        if number % _SLICE == 0:
            give_way()
        yield item


def _key(text: str) -> OffloadKey:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not key:
        raise ConfigError(f"expected a key in hexadecimal, found {text[:80]!r}")
    return OffloadKey(key)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ConfigError(f"expected a number of requests, found {text[:80]!r}")
    return int(text)
