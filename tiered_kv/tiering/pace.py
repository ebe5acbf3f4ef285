"""Whether a load arrives sooner than the engine can compute its blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tiered_kv.base import OffloadKey, get_offload_group_idx

TOO_SLOW: Final = "too_slow"
"""Why a block that a tier has is not promoted: the engine computes it sooner."""
FORGET: Final = 0.9
"""What the evidence of a load counts when the next one has come: about the last ten matter."""
LOADS_MIN: Final = 3
"""Loads without which nothing is known."""
RETRY_S: Final = 10.0
"""How long an estimate is believed without a new load. Then the blocks of a request are tried, which computes them."""
RETRY_MAX_S: Final = 600.0
"""Each try that took as long as expected doubles the time to the next, up to this."""
TRY_SHARE: Final = 0.1
"""What a request may wait for the answer that begins a try, relative to what it computes; any does after long."""
_SPREAD_MIN: Final = 0.05
"""How much the sizes of loads must differ, relative to their mean, to tell apart the two times."""


def computed_blocks(keys: Iterable[OffloadKey]) -> int:
    """Return how many blocks' worth of tokens `keys` are: the blocks of all KV cache groups are computed together."""
    return max(Counter(map(get_offload_group_idx, keys)).values(), default=0)


class Pace:
    """Learns what a tier's loads take: a time for each load, and a time for each block. Owned by the manager's thread.

    Both come from least squares over the last loads. The size of a load is the number of blocks that were in flight
    when it was submitted, its own included: it waits for those before it. What its answers to lookups take is learned
    too, for tiers that answer later.

    Args:
        compute_block_s: Seconds in which the engine computes a block; infinite if every load is worth its wait.

    Attributes:
        compute_growth_s: What each block before it adds to that.
    """

    def __init__(self, compute_block_s: float = math.inf) -> None:
        self.compute_block_s = compute_block_s
        self.compute_growth_s = 0.0
        self._loads = self._blocks = self._seconds = self._blocks_squared = self._products = 0.0
        self._seen = 0
        self._load_s = self._block_s = 0.0
        self._blocks_known = math.inf
        """The size up to which the time grows by `_block_s`, as far as is known; what is larger may take no longer."""
        self._added_s = -math.inf
        self._retry_s = RETRY_S
        self._due_s = -math.inf
        """When blocks are tried next, if none are loaded until then."""
        self._lookup_s = 0.0
        self._answered_s = -math.inf

    def compute_s(self, blocks: int, before: int = 0) -> float:
        """Return how long the engine takes to compute blocks, behind `before` others."""
        return blocks * (self.compute_block_s + self.compute_growth_s * (before + blocks / 2))

    def add(self, blocks: int, seconds: float, now_s: float) -> None:
        """Note that a load took `seconds`, with so many blocks in flight."""
        is_old = self._seen >= LOADS_MIN and now_s - seconds - self._added_s >= RETRY_S
        expected_s = self._load_of(blocks)
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
        slope, self._blocks_known = y / x, mean  # of loads of one size nobody knows which time is which
        if variance > (_SPREAD_MIN * mean) ** 2:
            slope, self._blocks_known = min(slope, max(0.0, (xy / weight - mean * y / weight) / variance)), math.inf
        self._block_s, self._load_s = slope, y / weight - slope * mean

    def is_worth(self, blocks: int, compute_s: float) -> bool:
        """Return whether blocks, and those in flight before them, arrive within `compute_s`, as far as is known."""
        return self._load_of(blocks) <= compute_s

    def tries(self, now_s: float) -> bool:
        """Return whether blocks that are not worth it are loaded all the same, without anyone who waits for them."""
        if now_s < self._due_s:
            return False
        self._due_s = now_s + self._retry_s
        return True

    def add_lookup(self, seconds: float, now_s: float) -> None:
        """Note that a request waited `seconds` for an answer to a lookup."""
        is_old = now_s - self._answered_s >= RETRY_S
        self._lookup_s = seconds if is_old else FORGET * self._lookup_s + (1 - FORGET) * seconds
        self._answered_s = now_s

    def is_answer_worth(self, blocks: int, compute_s: float, waited_s: float, now_s: float) -> bool:
        """Return whether blocks, if the tier has them, arrive within `compute_s`, or are to be tried.

        Args:
            blocks: Blocks to load, and those in flight before them.
            compute_s: How long the engine takes to compute what the request asks for.
            waited_s: How long the request has waited for the answer.
            now_s: The time.
        """
        if max(self._lookup_s, waited_s) + self._load_of(blocks) <= compute_s:
            return True
        due_s = max(self._due_s, self._answered_s + RETRY_S)
        if self._lookup_s > TRY_SHARE * compute_s:
            due_s += RETRY_MAX_S
        if waited_s <= compute_s and now_s >= due_s:
            return True
        if waited_s > self._lookup_s:  # so an answer takes that long at least
            self._lookup_s, self._answered_s = waited_s, now_s
        return False

    def _load_of(self, blocks: int) -> float:
        """Return the seconds that a load is expected to take, behind those in flight."""
        if self._seen < LOADS_MIN:
            return 0.0
        return self._load_s + self._block_s * min(blocks, self._blocks_known)
