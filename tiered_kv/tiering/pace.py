"""The pace of loads: whether a load arrives sooner than the engine computes its blocks.

`Search` and `Promotions` ask, and `GuardedTier` adds measured times, all on the scheduler's thread. It answers from its
measurements, in a few operations. An unknown pace never refuses a load for good: a few loads are made to learn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from tiered_kv.base import OffloadKey, group_of

FORGET: Final = 0.9
"""Factor for the weight of earlier loads at each new load: about the last ten matter."""
FIRST_LOADS: Final = (8, 32)
"""Blocks of the first loads, at most, one load at a time: their different sizes separate the two times."""
STALL_SHARE: Final = 0.6
"""Extra wait for a load, for each other request that computing would stall, as a share of the time to compute."""
STALLS_MAX: Final = 3.0
"""Limit of that extra wait for all stalled requests, in times to compute: a short prompt must not wait long."""
STALL_S_MAX: Final = 0.3
"""Limit of that extra wait in seconds: the stalled requests may have ended by then."""
CUT_BLOCKS_MIN: Final = 8
"""The least blocks of a prefix of which a part is loaded, and the other part computed."""
RETRY_S: Final = 10.0
"""Seconds without a load after which a load is tried although it is too slow. The load's request computes the
blocks."""
RETRY_MAX_S: Final = 600.0
"""Each try that took as long as expected doubles the time to the next, up to this limit."""
TRY_SHARE: Final = 0.1
"""If the lookup before a try takes more than this share of the compute time, the try comes `RETRY_MAX_S` later."""
_SPREAD_MIN: Final = 0.05
"""Standard deviation of load sizes, relative to their mean, from which both times can be estimated."""


def computed_blocks(keys: Iterable[OffloadKey]) -> int:
    """Return the number of blocks in the largest KV cache group of `keys`: all groups are computed together."""
    return max(Counter(map(group_of, keys)).values(), default=0)


@dataclass(slots=True)
class EngineCost:
    """An engine's costs of computing, in seconds. The manager's thread writes it. Several engines have one each."""

    block_s: float = math.inf
    """Time to compute a block; infinite if every load is worth its wait."""
    growth_s: float = 0.0
    """Growth of `block_s` with each block before it in the prompt."""
    backlog_s: float = 0.0
    """Time to compute the prompts before a new one. Meanwhile a request waits for a load at no cost."""
    notice_s: float = 0.0
    """From the end of a load until its request runs, on average."""
    stalled: int = 0
    """The engine's other requests. A prefill stalls the requests that run meanwhile; a load does not."""

    @property
    def is_known(self) -> bool:
        return self.block_s < math.inf

    def take(self, other: EngineCost) -> None:
        """Become equal to another one, for all holders of this one."""
        for name in EngineCost.__slots__:
            setattr(self, name, getattr(other, name))

    def snapshot(self) -> dict[str, float]:
        """Return the gauges; 0 if every load is worth its wait. Any thread may call."""
        return {
            "compute_block_seconds": self.block_s if self.is_known else 0.0,
            "compute_growth_seconds": self.growth_s,
            "compute_backlog_seconds": self.backlog_s,
        }

    def of(self, blocks: int, before: int = 0) -> float:
        """Return how long the engine takes to compute `blocks` blocks after `before` others."""
        return blocks * (self.block_s + self.growth_s * (before + blocks / 2))

    def saved_by(self, blocks: int, before: int = 0) -> float:
        """Return how long a request may wait for a load of `blocks` blocks, beyond the backlog.

        That is the time to compute these blocks, and a share of it for each request that computing would stall, up to
        limits.
        """
        compute_s = self.of(blocks, before)
        return compute_s + min(min(STALL_SHARE * self.stalled, STALLS_MAX) * compute_s, STALL_S_MAX)


class Pace:
    """Estimates a tier's time for each load, and for each block of it. Owned by the manager's thread.

    Both are a least-squares fit over the last loads. The size of a load is the number of blocks in flight at its
    submission, including its own: it waits for the loads before it. Stores share the device. So blocks of stores in
    flight count too, up to the number of blocks of loads. The time of the tier's answers to lookups is estimated too.
    One tier has one estimate for all engines, but each engine its own cost. `cost` serves the requests of an engine
    that reports none.
    """

    def __init__(self, cost: EngineCost) -> None:
        self.cost = cost
        self._loads = self._blocks = self._seconds = self._blocks_squared = self._products = 0.0
        self._seen = 0
        self._load_s = self._block_s = 0.0
        self._added_s = -math.inf
        self._retry_s = RETRY_S
        self._due_s = -math.inf
        """When the next try is due, if no load comes before."""
        self._lookup_s = 0.0
        self._answered_s = -math.inf

    def add(self, blocks: int, seconds: float, now_s: float) -> None:
        """Note that a load took `seconds`, with `blocks` in flight, at least one of them its own."""
        is_old = self.is_known and now_s - seconds - self._added_s >= RETRY_S
        expected_s = self._expected_s(blocks)
        is_as_before = expected_s / 2 <= seconds <= 2 * expected_s
        forget = FORGET if is_as_before or not is_old else 0.0
        self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s) if is_as_before and is_old else RETRY_S
        self._added_s, self._due_s = now_s, now_s + self._retry_s
        new = (1.0, blocks, seconds, blocks * blocks, blocks * seconds)
        old = (self._loads, self._blocks, self._seconds, self._blocks_squared, self._products)
        weight, x, y, xx, xy = (forget * before + now for before, now in zip(old, new, strict=True))
        self._loads, self._blocks, self._seconds, self._blocks_squared, self._products = weight, x, y, xx, xy
        self._seen += 1
        mean, variance = x / weight, xx / weight - (x / weight) ** 2
        slope = y / x  # loads of one size cannot separate the two times: larger ones are assumed to take longer
        if variance > (_SPREAD_MIN * mean) ** 2:
            slope = min(slope, max(0.0, (xy / weight - mean * y / weight) / variance))
        self._block_s, self._load_s = slope, max(0.0, y / weight - slope * mean)  # rounding

    @property
    def is_known(self) -> bool:
        """Whether enough loads have ended for an estimate."""
        return self._seen >= len(FIRST_LOADS)

    def snapshot(self) -> dict[str, float]:
        """Return the gauges; 0 until the times are known. Any thread may call."""
        load_s, block_s = (self._load_s, self._block_s) if self.is_known else (0.0, 0.0)
        return {"expected_load_seconds": load_s, "expected_block_seconds": block_s}

    def worth(
        self,
        blocks: int,
        in_flight: int,
        saved: Callable[[int], float],
        backlog_s: float,
        *,
        is_whole: bool = False,
        cost: EngineCost | None = None,
    ) -> int:
        """Return how many of `blocks` blocks, from the first one on, arrive before the engine would have computed them.

        Args:
            in_flight: Blocks in flight before them, as in `add`.
            saved: Returns how many seconds the engine saves by a number of blocks.
            backlog_s: How long the engine is busy before it would compute them.
            is_whole: Whether a part of them is of no use.
            cost: Of the request's engine.
        """
        if not self.is_known:
            return blocks if is_whole else min(blocks, FIRST_LOADS[self._seen])
        wait_s = backlog_s - (cost or self.cost).notice_s

        def is_worth(part: int) -> bool:
            return self._expected_s(in_flight + part) <= wait_s + saved(part)

        if is_worth(blocks):
            return blocks
        # A later block saves more than an earlier one. So if all blocks together come too late, a part of them comes in
        # time only because the engine is busy for a while.
        first, end = 0, 0 if is_whole else blocks
        while end - first > 1:
            middle = (first + end) // 2
            first, end = (middle, end) if is_worth(middle) else (first, middle)
        return first if first >= CUT_BLOCKS_MIN else 0

    def blocks_in(self, seconds: float, blocks_max: int) -> int:
        """Return how many blocks, at most `blocks_max`, the storage moves in so many seconds, by its rate alone."""
        return blocks_max if seconds >= blocks_max * self._block_s else int(seconds / self._block_s)

    def tries(self, now_s: float) -> bool:
        """Return whether a try is due: a load that is too slow, to measure the tier again. No request waits for it."""
        if now_s < self._due_s or not self.is_known:
            return False
        self._due_s = now_s + self._retry_s
        return True

    def add_lookup(self, seconds: float, now_s: float) -> None:
        """Note that a request waited `seconds` for an answer to a lookup."""
        is_old = now_s - self._answered_s >= RETRY_S
        self._lookup_s = seconds if is_old else FORGET * self._lookup_s + (1 - FORGET) * seconds
        self._answered_s = now_s

    def worth_asking(
        self,
        blocks: int,
        in_flight: int,
        saved: Callable[[int], float],
        waited_s: float,
        now_s: float,
        *,
        is_whole: bool = False,
        cost: EngineCost | None = None,
    ) -> int:
        """Return for how many blocks to ask the tier: those that come in time, or all if a try is due.

        The tier is assumed to have all blocks, and the time of its answer counts. The request has waited `waited_s` for
        the answer. The other arguments are as in `worth`.
        """
        backlog_s = (cost or self.cost).backlog_s
        answer_s, compute_s = max(self._lookup_s, waited_s), backlog_s + saved(blocks)
        if self.is_known or answer_s <= compute_s:
            worth = self.worth(blocks, in_flight, saved, backlog_s - answer_s, is_whole=is_whole, cost=cost)
            if worth:
                return worth
        due_s = max(self._due_s, self._answered_s + RETRY_S)
        if self._lookup_s > TRY_SHARE * compute_s:
            due_s += RETRY_MAX_S
        if waited_s <= compute_s and now_s >= due_s:
            return blocks
        if waited_s > self._lookup_s:  # the answer takes at least that long
            self._lookup_s, self._answered_s = waited_s, now_s
        return 0

    def _expected_s(self, blocks: int) -> float:
        return self._load_s + self._block_s * blocks if self.is_known else 0.0
