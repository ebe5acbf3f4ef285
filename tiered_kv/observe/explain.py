"""Why a block was a miss: answers from the history, for programs and for `tiered-kv why`."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from tiered_kv.base import OffloadKey
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.errors import ConfigError
from tiered_kv.observe.fates import PRESENT, Fate
from tiered_kv.observe.history import BlockHistory
from tiered_kv.observe.ledger import CPU, REQUEST_ID_CHARACTERS_MAX, EndedRequest
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.step import give_way

KEYS_MAX: Final = 1024
"""Keys, or requests, in one question."""

_SLICE: Final = 32
"""Keys that are described at once; that holds the interpreter for some 100 microseconds."""
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class TierFate:
    """What became of a block in one tier.

    Attributes:
        fate: "present" (the primary tier has it), "stored", "unknown", or the reason for a miss as in `misses_total`.
        age_s: How many seconds ago that was noted; None for "present" and "unknown".
    """

    tier: str
    fate: str
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a block in each tier, in the order of the search."""

    key: OffloadKey
    tiers: tuple[TierFate, ...]


class Observed(Protocol):
    """What is looked at: a `Stack`."""

    config: StackConfig
    history: BlockHistory | None
    manager: TieringOffloadingManager
    opened_s: float

    def counters(self) -> dict[str, dict[str, Any]]:  # Any: as `Counters.snapshot`
        """Return all counters."""

    def explain(self, keys: Sequence[OffloadKey]) -> list[Explanation]:
        """Return what became of each block."""


def explain(
    history: BlockHistory, blocks: Mapping[OffloadKey, CPUBlock], keys: Sequence[OffloadKey]
) -> list[Explanation]:
    """Return what became of each block; any thread may call.

    Args:
        blocks: The primary tier's index; it is only asked for single keys, which needs no lock.
    """
    found = []
    for key, fates in _in_slices(zip(keys, history.fates(keys), strict=True)):
        block = blocks.get(key)
        tiers = [
            TierFate(name, fate.label, None if fate is Fate.UNKNOWN else age_s)
            for name, (fate, age_s) in zip(history.names, fates, strict=True)
        ]
        if block is not None and block.ref_cnt >= 0:
            tiers[CPU] = TierFate(history.names[CPU], PRESENT, None)
        found.append(Explanation(key, tuple(tiers)))
    return found


def explain_query(stack: Observed, query: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Answer `/explain?key=HEX&key=HEX`, `/explain?request=ID` or `/explain?last=N`; any thread may call.

    Args:
        query: As `urllib.parse.parse_qs` returns it: `key` (in hexadecimal), `request` (an id), and `last` (the last N
            requests that missed a block), in any combination.

    Returns:
        `namespace`, a digest in hexadecimal; `tiers`, their names; `keys` and `requests`, as
        `docs/reference/command.md` describes them; and `unexplained_blocks_total`.

    Raises:
        ConfigError: The stack has no history, or the question is none.
    """
    if stack.history is None:
        raise ConfigError("the stack keeps no history: its setting 'history' is 0", location="history")
    if unknown := query.keys() - {"key", "request", "last"}:
        raise ConfigError(f"expected 'key', 'request' or 'last', found {sorted(unknown)}")
    keys = [_key(text) for text in query.get("key", [])]
    wanted = query.get("request", [])
    last = sum(_count(text) for text in query.get("last", []))
    if max(len(keys), len(wanted), last) > KEYS_MAX:
        raise ConfigError(f"expected at most {KEYS_MAX} keys and requests")
    known_as = frozenset(each[:REQUEST_ID_CHARACTERS_MAX] for each in wanted)
    requests = _chosen(stack.history.requests() if wanted or last else [], known_as, last)
    return {
        "namespace": stack.config.identity.digest.hex(),
        "tiers": list(stack.history.names),
        "keys": list(_in_slices(map(_described, stack.explain(keys)))),
        "requests": list(_in_slices(_described_request(stack, stack.history, request) for request in requests)),
        "unexplained_blocks_total": stack.history.dropped_blocks,
    }


def _chosen(ended: Sequence[EndedRequest], wanted: frozenset[str], last: int) -> list[EndedRequest]:
    """Return the requests that were asked for, the latest first; the last one of several with the same id."""
    by_id = {request.req_id: request for request in ended if request.req_id in wanted}
    missing = [request for request in reversed(ended) if request.missed_blocks][:last]
    return sorted({id(each): each for each in (*by_id.values(), *missing)}.values(), key=lambda each: -each.ended_s)


def _described(explanation: Explanation) -> dict[str, object]:
    return {
        "key": explanation.key.hex(),
        "tiers": {each.tier: {"fate": each.fate, "age_seconds": each.age_s} for each in explanation.tiers},
    }


def _described_request(stack: Observed, history: BlockHistory, request: EndedRequest) -> dict[str, object]:
    first = request.first_missed
    return {
        "request": request.req_id,
        "age_seconds": history.age_s(request),
        "hits": dict(request.hits),
        "misses": {tier: dict(reasons) for tier, reasons in request.misses.items()},
        "missed_blocks": request.missed_blocks,
        "first_missed": None if first is None else _described(stack.explain([first])[0]),
        "first_missed_because": dict(request.first_because),
    }


def _in_slices(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, and let a scheduler's step go first after each `_SLICE`."""
    for number, item in enumerate(items):
        if number % _SLICE == 0:
            give_way()
        yield item


def _key(text: str) -> OffloadKey:
    digits = text.strip()
    if not digits or len(digits) % 2 or not set(digits) <= set(string.hexdigits):
        raise ConfigError(f"expected a key in hexadecimal, found {text[:80]!r}")
    return OffloadKey(bytes.fromhex(digits))


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ConfigError(f"expected a number of requests, found {text[:80]!r}")
    return int(text)
