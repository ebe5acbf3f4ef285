"""Estimates whether a load arrives sooner than the engine computes its blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tiered_kv.base import OffloadKey, get_offload_group_idx

TOO_SLOW: Final = "too_slow"
"""The reason in counters for blocks that are not promoted because the engine computes them sooner."""
FORGET: Final = 0.9
"""Factor for the weight of earlier loads at each new load: about the last ten matter."""
LOADS_MIN: Final = 3
"""Loads before the first estimate."""
RETRY_S: Final = 10.0
"""After this time without a load, one load is tried although it is too slow. Its request computes the blocks."""
RETRY_MAX_S: Final = 600.0
"""Each try that took as long as expected doubles the time to the next, up to this limit."""
TRY_SHARE: Final = 0.1
"""A request may wait this part of its compute time for the lookup before a try; longer after `RETRY_MAX_S`."""
_SPREAD_MIN: Final = 0.05
"""Standard deviation of load sizes, relative to their mean, from which both times can be estimated."""


def computed_blocks(keys: Iterable[OffloadKey]) -> int:
    """Return the number of blocks in the largest KV cache group of `keys`: all groups are computed together."""
    return max(Counter(map(get_offload_group_idx, keys)).values(), default=0)


class Pace:
    """Estimates a tier's time for each load, and for each block of it. Owned by the manager's thread.

    Both are a least-squares fit over the last loads. The size of a load is the number of blocks in flight at its
    submission, including its own: it waits for the loads before it. The time of the tier's answers to lookups is
    estimated too.

    Args:
        compute_block_s: Seconds in which the engine computes a block; infinite if every load is worth its wait.

    Attributes:
        compute_growth_s: Seconds that each block before it adds to `compute_block_s`.
    """

    def __init__(self, compute_block_s: float = math.inf) -> None:
        self.compute_block_s = compute_block_s
        self.compute_growth_s = 0.0
        self._loads = self._blocks = self._seconds = self._blocks_squared = self._products = 0.0
        self._seen = 0
        self._load_s = self._block_s = 0.0
        self._blocks_known = math.inf
        """The largest size for which `_block_s` is known; larger loads are assumed to take no longer."""
        self._added_s = -math.inf
        self._retry_s = RETRY_S
        self._due_s = -math.inf
        """When the next try is due, if no load comes before."""
        self._lookup_s = 0.0
        self._answered_s = -math.inf

    def compute_s(self, blocks: int, before: int = 0) -> float:
        """Return how long the engine takes to compute `blocks` blocks after `before` others."""
        return blocks * (self.compute_block_s + self.compute_growth_s * (before + blocks / 2))

    def add(self, blocks: int, seconds: float, now_s: float) -> None:
        """Note that a load took `seconds`, with `blocks` in flight, at least one of them its own."""
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
        slope, self._blocks_known = y / x, mean  # loads of one size cannot separate the two times
        if variance > (_SPREAD_MIN * mean) ** 2:
            slope, self._blocks_known = min(slope, max(0.0, (xy / weight - mean * y / weight) / variance)), math.inf
        self._block_s, self._load_s = slope, y / weight - slope * mean

    def is_worth(self, blocks: int, compute_s: float) -> bool:
        """Return whether a load is estimated to arrive within `compute_s`; `blocks` as in `add`."""
        return self._load_of(blocks) <= compute_s

    def tries(self, now_s: float) -> bool:
        """Return whether a try is due: a load that is too slow, to measure the tier again. No request waits for it."""
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
        """Return whether to wait for an answer: its blocks would arrive within `compute_s`, or a try is due.

        Args:
            blocks: Blocks to load, and those in flight before them.
            compute_s: How long the engine takes to compute the blocks.
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
        if waited_s > self._lookup_s:  # the answer takes at least that long
            self._lookup_s, self._answered_s = waited_s, now_s
        return False

    def _load_of(self, blocks: int) -> float:
        if self._seen < LOADS_MIN:
            return 0.0
        return self._load_s + self._block_s * min(blocks, self._blocks_known)
