"""Hints of a request about its blocks. They are evidence for the policy, not commands.

A hint comes in `ReqContext.kv_transfer_params`, beside the engine's own parameters:

    {"tiered_kv": {"priority": 1, "ttl": 600, "expect_return": 20, "skip": "store"}}

Clients write them, so they are validated strictly. Invalid hints are ignored.
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
"""The longest time in a hint: a week."""
BY_REQUEST: Final = "by_request"
"""The reason that is counted for blocks which are not stored or loaded because of the hint `skip`."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of a request about the blocks that it is the last to use.

    Args:
        priority: Value of their hits beside other requests': -1, 0 or 1.
        ttl_s: Seconds after which no request will use them.
        expect_return_s: Seconds after which a request will probably use them.
        skips_store: The request's new blocks are not stored.
        skips_load: The request loads no blocks, and computes its whole prompt.
    """

    priority: int = 0
    ttl_s: float | None = None
    expect_return_s: float | None = None
    skips_store: bool = False
    skips_load: bool = False

    @classmethod
    def parse(cls, given: object, allowed: Collection[str] = HINT_NAMES) -> Hints:
        """Return the `allowed` hints of a mapping.

        Raises:
            ValueError: It is no mapping of `HINT_NAMES`, or a value is invalid. The message repeats no value.
        """
        if not isinstance(given, Mapping) or not all(name in HINT_NAMES for name in given):
            raise ValueError(f"expected a mapping of {', '.join(HINT_NAMES)}")
        hints = {name: given[name] for name in allowed if given.get(name) is not None}
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

    def given(self) -> dict[str, object] | None:
        """Return the mapping that `parse` takes; None without hints."""
        if self == _NONE:
            return None
        skip = [name for name, skips in (("store", self.skips_store), ("load", self.skips_load)) if skips]
        return {"priority": self.priority, "ttl": self.ttl_s, "expect_return": self.expect_return_s, "skip": skip}


_NONE: Final = Hints()


def _seconds(hints: Mapping[str, Any], name: str) -> float | None:
    value = hints.get(name)
    if value is not None and not (type(value) in (int, float) and 0 <= value <= SECONDS_MAX):
        raise ValueError(f"{name}: expected seconds from 0 to {SECONDS_MAX:.0f}")
    return value


class HintReader:
    """Parses the hints of requests, and counts them. Owned by one thread.

    Args:
        allowed: The hints that are used; others are ignored.

    Attributes:
        hinted: Number of requests with hints.
        refused: Number of requests with invalid hints; the first is logged.
    """

    def __init__(self, allowed: Collection[str] = HINT_NAMES) -> None:
        self.hinted = self.refused = 0
        self._allowed = allowed

    def read(self, params: Mapping[str, Any] | None) -> Hints | None:  # Any: the engine's own
        """Return the hints in a request's parameters; None if it has none, or they are invalid."""
        given = params.get(HINTS_KEY) if self._allowed and isinstance(params, Mapping) else None
        if given is None:
            return None
        try:
            hints = Hints.parse(given, self._allowed)
        except ValueError as error:
            self.refused += 1
            if self.refused == 1:
                _log.warning("invalid hints are ignored; the first: %s", error)
            return None
        self.hinted += 1
        return hints
