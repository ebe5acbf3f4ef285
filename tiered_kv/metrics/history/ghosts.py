"""Ghosts: estimates of the hits that a tier would have with another capacity.

`ledger.Ledger` makes one for each tier, and calls it under its lock, on the history's thread or on a reader's. A ghost
follows a sample of the keys, without bytes, in bounded memory. No reported number becomes less.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from tiered_kv.metrics.history.fates import Hashes

SIZES: Final = {"0.5": 0.5, "1": 1.0, "2": 2.0, "4": 4.0}
"""Multiples of the tier's capacity. Compare the counts with the count at 1, which is an estimate too."""
SAMPLED_MAX: Final = 4096
"""Blocks that the largest ghost of a tier follows; with the smaller ones they take 1.2 MB."""
_HASHES: Final = 1 << 32
_LOW: Final = np.uint64(_HASHES - 1)


class Ghosts:
    """Estimates of the hits of a tier with a capacity of `blocks` at other sizes. The caller serializes all calls.

    A ghost is an LRU list of keys without bytes. It follows blocks with a hash in a fixed share of all hashes, and its
    size is that share of the tier's: C. Waldspurger, N. Park, A. Garthwaite and I. Ahmad, "Efficient MRC Construction
    with SHARDS" (FAST 2015). As SHARDS-adj does, it estimates misses and counts all other uses as hits. A few blocks
    have many of the hits, and the sample may have too many or too few of these blocks; misses come from many blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._share = min(1.0, SAMPLED_MAX / (max(SIZES.values()) * blocks))
        self._below = np.uint64(min(int(self._share * _HASHES), _HASHES - 1))
        self._limits = [max(1, round(times * blocks * self._share)) for times in SIZES.values()]
        self._followed: list[OrderedDict[int, None]] = [OrderedDict() for _ in SIZES]
        self._uses = 0
        self._misses = [0] * len(SIZES)  # the sample's
        self._reported = [0] * len(SIZES)

    def use(self, digests: Hashes) -> None:
        """Note that requests use blocks: they load them, or store them after a miss."""
        self._uses += len(digests)
        sample = digests[(digests & _LOW) <= self._below].tolist()
        for size, followed in enumerate(self._followed):
            limit = self._limits[size]
            for digest in sample:
                if digest in followed:
                    followed.move_to_end(digest)
                else:
                    self._misses[size] += 1
                    followed[digest] = None
                    if len(followed) > limit:
                        followed.popitem(last=False)

    def reset(self) -> None:
        for followed in self._followed:
            followed.clear()

    def snapshot(self) -> dict[str, int]:
        """Return the hits of each size so far; no number becomes less."""
        hits = (self._uses - int(misses / self._share) for misses in self._misses)
        self._reported = list(map(max, self._reported, hits))
        return dict(zip(SIZES, self._reported, strict=True))
