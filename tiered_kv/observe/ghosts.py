"""Ghosts: what a tier would hit if it were smaller or larger, from a sample of the blocks that requests use.

A ghost remembers which blocks a tier of another size would have, the least recently used going first, and no bytes. It
follows only blocks whose hash falls into a fixed share of all hashes, and stands for a tier of that share of the size:
C. Waldspurger, N. Park, A. Garthwaite and I. Ahmad, "Efficient MRC Construction with SHARDS" (FAST 2015). As they do in
SHARDS-adj, it estimates misses and takes all else for hits. Few blocks have many of the hits, and the sample may have
too many or too few of these; misses come from many blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from tiered_kv.observe.fates import Entries

SIZES: Final = {"0.5": 0.5, "1": 1.0, "2": 2.0, "4": 4.0}
"""The sizes of the ghosts, as multiples of the tier's capacity; the others are to be compared with that of 1."""
SAMPLED_MAX: Final = 4096
"""Blocks that the largest ghost of a tier follows; with the smaller ones they take 1.2 MB."""
_HASHES: Final = 1 << 32
_LOW: Final = np.uint64(_HASHES - 1)


class Ghosts:
    """The ghosts of one tier. The caller serializes all calls.

    Args:
        blocks: The tier's capacity.
    """

    def __init__(self, blocks: int) -> None:
        self._share = min(1.0, SAMPLED_MAX / (max(SIZES.values()) * blocks))
        self._below = np.uint64(min(int(self._share * _HASHES), _HASHES - 1))
        self._limits = [max(1, round(times * blocks * self._share)) for times in SIZES.values()]
        self._followed: list[OrderedDict[int, None]] = [OrderedDict() for _ in SIZES]
        self._uses = 0
        self._misses = [0] * len(SIZES)  # of the sample
        self._told = [0] * len(SIZES)

    def use(self, digests: Entries) -> None:
        """Note that requests use blocks: they load them, or store them because nobody had them."""
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
        """Forget all blocks, as the tier does."""
        for followed in self._followed:
            followed.clear()

    def counted(self) -> dict[str, int]:
        """Return how many of the blocks used so far each size would have had; no number becomes less."""
        hits = (self._uses - int(misses / self._share) for misses in self._misses)
        self._told = list(map(max, self._told, hits))
        return dict(zip(SIZES, self._told, strict=True))
