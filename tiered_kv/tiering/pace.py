"""Whether a load arrives sooner than the engine can compute its blocks."""

from __future__ import annotations

import math
from typing import Final

TOO_SLOW: Final = "too_slow"
"""Why a block that a tier has is not promoted: the engine computes it sooner."""
FORGET: Final = 0.9
"""What the evidence of a load counts when the next one has come: about the last ten matter."""
LOADS_MIN: Final = 3
"""Loads without which nothing is known."""
RETRY_S: Final = 10.0
"""How long an estimate is believed without a new load. Then one load is tried, and those before it are forgotten."""
_SPREAD_MIN: Final = 0.05
"""How much the sizes of loads must differ, relative to their mean, to tell apart the two times."""


class Pace:
    """Learns what a tier's loads take: a time for each load, and a time for each block. Owned by the manager's thread.

    Both come from least squares over the last loads. The size of a load is the number of blocks that were in flight
    when it was submitted, its own included: it waits for those before it.

    Args:
        compute_block_s: Seconds in which the engine computes a block; infinite where every load is worth its wait.
    """

    def __init__(self, compute_block_s: float) -> None:
        self._compute_block_s = compute_block_s
        self._loads = self._blocks = self._seconds = self._blocks_squared = self._products = 0.0
        self._seen = 0
        self._load_s = self._block_s = 0.0
        self._blocks_known = math.inf
        """The size up to which the time grows by `_block_s`, as far as is known; what is larger may take no longer."""
        self._believed_until_s = -math.inf
        self._is_trying = False

    def add(self, blocks: int, seconds: float, now_s: float) -> None:
        """Note that a load took `seconds`, with so many blocks in flight."""
        if self._compute_block_s == math.inf:
            return
        forget, self._is_trying = 0.0 if self._is_trying else FORGET, False
        new = (1.0, blocks, seconds, blocks * blocks, blocks * seconds)
        old = (self._loads, self._blocks, self._seconds, self._blocks_squared, self._products)
        weight, x, y, xx, xy = (forget * before + now for before, now in zip(old, new, strict=True))
        self._loads, self._blocks, self._seconds, self._blocks_squared, self._products = weight, x, y, xx, xy
        self._seen += 1
        self._believed_until_s = now_s + RETRY_S
        mean, variance = x / weight, xx / weight - (x / weight) ** 2
        slope, self._blocks_known = y / x, mean  # of loads of one size nobody knows which time is which
        if variance > (_SPREAD_MIN * mean) ** 2:
            slope, self._blocks_known = min(slope, max(0.0, (xy / weight - mean * y / weight) / variance)), math.inf
        self._block_s, self._load_s = slope, y / weight - slope * mean

    def is_hopeless(self, now_s: float) -> bool:
        """Return whether the engine computes a block sooner than it comes, however many are loaded together."""
        is_known = self._blocks_known == math.inf
        return is_known and self._block_s >= self._compute_block_s and self._is_believed(now_s)

    def is_worth(self, blocks: int, ahead_blocks: int, now_s: float) -> bool:
        """Return whether so many blocks arrive sooner than they are computed, behind those in flight.

        Where nothing is known they are; where no load has come for `RETRY_S` they are, once.
        """
        expected_s = self._load_s + self._block_s * min(ahead_blocks + blocks, self._blocks_known)
        if expected_s <= blocks * self._compute_block_s:
            return True
        if self._is_believed(now_s):
            return False
        if self._seen >= LOADS_MIN:
            self._is_trying, self._believed_until_s = True, now_s + RETRY_S
        return True

    def _is_believed(self, now_s: float) -> bool:
        return self._seen >= LOADS_MIN and now_s < self._believed_until_s
