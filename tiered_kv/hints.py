"""Hints: what a request says of its blocks. They are evidence for the policy, and never an order.

A hint comes with `ReqContext.kv_transfer_params`, under one key beside those of the engine:

    {"tiered_kv": {"priority": 1, "ttl": 600, "expect_return": 20, "skip": "store"}}

Whoever sends requests writes them, so they are read strictly, and what cannot be read is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

_log = logging.getLogger(__name__)

HINTS_KEY: Final = "tiered_kv"
HintName = Literal["priority", "ttl", "expect_return", "skip"]
HINT_NAMES: Final[tuple[HintName, ...]] = get_args(HintName)
SECONDS_MAX: Final = 604_800.0
"""A week: the longest time that a hint may say."""
BY_REQUEST: Final = "by_request"
"""The reason for which a block is not stored, or not loaded, that a request wants to skip."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of the blocks that it is the last to use.

    Args:
        priority: -1, 0 or 1: what their hits are worth, beside those of other requests.
        ttl_s: After so many seconds nobody asks for them any more; None where the request does not say.
        expect_return_s: A request will ask for them in about so many seconds.
        skips_store: What the request computes is not stored.
        skips_load: The request gets no blocks, and computes all of its prompt.
    """

    priority: int = 0
    ttl_s: float | None = None
    expect_return_s: float | None = None
    skips_store: bool = False
    skips_load: bool = False

    @classmethod
    def parse(cls, said: object, allowed: Collection[str] = HINT_NAMES) -> Hints:
        """Return the hints of a mapping of `HINT_NAMES`, those left out that are not `allowed`.

        Raises:
            ValueError: It is none, or a value in it cannot be used. The message repeats nothing of it.
        """
        if not isinstance(said, Mapping) or not all(name in HINT_NAMES for name in said):
            raise ValueError(f"expected a mapping of {', '.join(HINT_NAMES)}")
        hints = {name: said[name] for name in allowed if said.get(name) is not None}
        priority = hints.get("priority", 0)
        if type(priority) is not int or not -1 <= priority <= 1:
            raise ValueError("priority: expected -1, 0 or 1")
        skip = hints.get("skip", ())
        skipped = (skip,) if isinstance(skip, str) else skip
        if not isinstance(skipped, (list, tuple)) or not all(what in ("store", "load") for what in skipped):
            raise ValueError("skip: expected 'store', 'load', or a list of both")
        return cls(
            priority,
            _seconds(hints, "ttl"),
            _seconds(hints, "expect_return"),
            skips_store="store" in skipped,
            skips_load="load" in skipped,
        )


def _seconds(hints: Mapping[str, Any], name: str) -> float | None:
    value = hints.get(name)
    if value is not None and not (type(value) in (int, float) and 0 <= value <= SECONDS_MAX):
        raise ValueError(f"{name}: expected seconds from 0 to {SECONDS_MAX:.0f}")
    return value


class HintReader:
    """Reads the hints of requests, and counts them. Owned by one thread, that of the manager or the tier.

    Args:
        allowed: The hints that count; others are left out.

    Attributes:
        hinted: Requests with hints.
        refused: Requests whose hints could not be read; the first is logged.
    """

    def __init__(self, allowed: Collection[str] = HINT_NAMES) -> None:
        self.hinted = self.refused = 0
        self._allowed = allowed

    def read(self, params: Mapping[str, Any] | None) -> Hints | None:  # Any: the engine's own
        """Return the hints among a request's parameters; None where there are none, or none that can be read."""
        said = params.get(HINTS_KEY) if self._allowed and isinstance(params, Mapping) else None
        if said is None:
            return None
        try:
            hints = Hints.parse(said, self._allowed)
        except ValueError as error:
            self.refused += 1
            if self.refused == 1:
                _log.warning("hints that cannot be read are left out; the first: %s", error)
            return None
        self.hinted += 1
        return hints
