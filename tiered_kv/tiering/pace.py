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
"""How long an estimate is believed without a new load. Then one load is tried, and those before it are forgotten."""
RETRY_MAX_S: Final = 600.0
"""Each try that was too slow doubles the time to the next, up to this: a try may cost a request its time."""
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
        compute_block_s: Seconds in which the engine computes a block; infinite where every load is worth its wait.
    """

    def __init__(self, compute_block_s: float) -> None:
        self.compute_block_s = compute_block_s
        self._loads = self._blocks = self._seconds = self._blocks_squared = self._products = 0.0
        self._seen = 0
        self._load_s = self._block_s = 0.0
        self._blocks_known = math.inf
        """The size up to which the time grows by `_block_s`, as far as is known; what is larger may take no longer."""
        self._believed_until_s = -math.inf
        self._is_trying = False
        self._retry_s = self._lookup_retry_s = RETRY_S
        self._worth_s = 0.0
        """What the load that is tried may take."""
        self._lookup_s = 0.0
        self._lookup_until_s = -math.inf

    def add(self, blocks: int, seconds: float, now_s: float) -> None:
        """Note that a load took `seconds`, with so many blocks in flight."""
        if self._is_trying:
            self._retry_s = RETRY_S if seconds <= self._worth_s else min(RETRY_MAX_S, 2 * self._retry_s)
        forget, self._is_trying = 0.0 if self._is_trying else FORGET, False
        new = (1.0, blocks, seconds, blocks * blocks, blocks * seconds)
        old = (self._loads, self._blocks, self._seconds, self._blocks_squared, self._products)
        weight, x, y, xx, xy = (forget * before + now for before, now in zip(old, new, strict=True))
        self._loads, self._blocks, self._seconds, self._blocks_squared, self._products = weight, x, y, xx, xy
        self._seen += 1
        self._believed_until_s = now_s + self._retry_s
        mean, variance = x / weight, xx / weight - (x / weight) ** 2
        slope, self._blocks_known = y / x, mean  # of loads of one size nobody knows which time is which
        if variance > (_SPREAD_MIN * mean) ** 2:
            slope, self._blocks_known = min(slope, max(0.0, (xy / weight - mean * y / weight) / variance)), math.inf
        self._block_s, self._load_s = slope, y / weight - slope * mean

    def is_hopeless(self, now_s: float) -> bool:
        """Return whether the engine computes a block sooner than it comes, however many are loaded together."""
        is_known = self._blocks_known == math.inf
        return is_known and self._block_s >= self.compute_block_s and self._is_believed(now_s)

    def is_worth(self, blocks: int, computed_blocks: int, now_s: float) -> bool:
        """Return whether blocks arrive sooner than they are computed.

        Where nothing is known they do; where no load has come for `RETRY_S`, or longer, they do, once.

        Args:
            blocks: Blocks to load, and those in flight before them.
            computed_blocks: Blocks of one group that the engine computes where these do not come.
            now_s: The time.
        """
        worth_s = computed_blocks * self.compute_block_s
        if self._load_of(blocks) <= worth_s:
            return True
        if self._is_believed(now_s):
            return False
        if self._seen >= LOADS_MIN:
            self._is_trying, self._believed_until_s = True, now_s + self._retry_s
            self._worth_s = worth_s
        return True

    def add_lookup(self, seconds: float, now_s: float) -> None:
        """Note that a request waited `seconds` for an answer to a lookup."""
        is_known = now_s < self._lookup_until_s
        if not is_known:
            is_as_before = 0 < self._lookup_s <= 2 * seconds
            self._lookup_retry_s = min(RETRY_MAX_S, 2 * self._lookup_retry_s) if is_as_before else RETRY_S
        self._lookup_s = FORGET * self._lookup_s + (1 - FORGET) * seconds if is_known else seconds
        self._lookup_until_s = now_s + self._lookup_retry_s

    def is_answer_worth(self, blocks: int, computed_blocks: int, waited_s: float, now_s: float) -> bool:
        """Return whether blocks, if the tier has them, arrive sooner than they are computed; as `is_worth`.

        Where no request has waited for an answer for `RETRY_S`, or longer, one waits until its blocks would come too
        late.
        """
        lookup_s = self._lookup_s if now_s < self._lookup_until_s else 0.0
        load_s = self._load_of(blocks) if self._is_believed(now_s) else 0.0
        if max(lookup_s, waited_s) + load_s <= computed_blocks * self.compute_block_s:
            return True
        if waited_s > lookup_s:  # so an answer takes that long at least
            if self._lookup_s and now_s >= self._lookup_until_s:
                self._lookup_retry_s = min(RETRY_MAX_S, 2 * self._lookup_retry_s)
            self._lookup_s, self._lookup_until_s = max(self._lookup_s, waited_s), now_s + self._lookup_retry_s
        return False

    def _load_of(self, blocks: int) -> float:
        """Return the seconds that a load is expected to take, behind those in flight."""
        return self._load_s + self._block_s * min(blocks, self._blocks_known)

    def _is_believed(self, now_s: float) -> bool:
        return self._seen >= LOADS_MIN and now_s < self._believed_until_s
