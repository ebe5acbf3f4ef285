"""Estimates of hit density: the hits that something brings for the room and time that it takes, by its group and age.

What is kept, or not, is called a tail here: the primary tier's policy `density` keeps tails of prompts.

The chance of a return at some age, the hazard, is that of the tail's kind at this age, times a factor of its group
(proportional hazards: D. R. Cox, 1972). The density at an age is the chance that the tail returns while it is kept,
over the time that it is expected to stay. It is kept for as long as makes this the most.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]

AGES_PER_TURNOVER: Final = 8
"""The unit of age is the time in which so small a part of the tier is written anew: an eighth."""
BUCKETS: Final = 19
"""Buckets of age: the first unit, then two for each doubling, up to 64 times what the tier holds."""
EDGES: Final = [0.0, *(2.0 ** (bucket / 2) for bucket in range(BUCKETS))]
"""Where each bucket begins, and where the last one would end."""
DECAY: Final = 0.97
"""What the evidence counts for, each time that the densities are computed anew: it halves in 23 times."""
PRIOR_TAILS: Final = 2.0
"""Tails that the prior counts for in each bucket."""
PRIOR_HITS: Final = 4.0
"""Hits that the prior counts for in each group."""
LEVELS: Final = 4.0
"""Levels in a factor of e: the estimates tell no smaller differences, so densities within about a quarter are equal."""
COLD_AGE: Final = 1.0
"""The prior hazard is that of a density which falls with the root of this age and a tail's own."""
_PRIOR: Final[Table] = 1 - np.sqrt((COLD_AGE + np.array(EDGES[:-1])) / (COLD_AGE + np.array(EDGES[1:])))
_WIDTHS: Final[Table] = np.diff(EDGES)


class HitDensity:
    """Counts of tails and of their returns, and what follows from them.

    A cell is a group at an age: number `group * BUCKETS + bucket`.

    Args:
        kinds: The kinds of tails, each with a hazard of its own.
        groups: The groups of each kind; the first so many are those of the first kind.
        decay: What the evidence counts for, each time that the densities are computed anew.

    Attributes:
        seen: Tails that reached a cell, less the parts that were used before.
        hits: The parts of them that a request has used there.
        level: The density of each cell, in steps of its logarithm.
        weights: What a hit of each kind is worth.
    """

    def __init__(self, kinds: int, groups: int, *, decay: float = DECAY) -> None:
        self._decay = decay
        self._first_kinds = kinds
        self._groups = groups
        self.hits, self.seen = array("d"), array("d")
        self._factor: Table = np.ones((0, groups, 1))
        self.level: list[float] = []
        self.weights: list[float] = []
        for _ in range(kinds):
            self.add_kind()
        self.learn()

    def add_kind(self) -> int:
        """Add a kind with cells behind all others, and return its number; `learn` says what they are worth.

        It begins as the first kind: that is its prior.
        """
        empty = array("d", bytes(8 * self._groups * BUCKETS))
        self.hits, self.seen = self.hits + empty, self.seen + empty
        self._factor = np.concatenate([self._factor, np.ones((1, self._groups, 1))])
        self.weights.append(1.0)
        return len(self.weights) - 1

    def learn(self) -> None:
        """Compute the densities from what has been counted, and let it count for less from now on."""
        hits, seen = (np.frombuffer(count).reshape(-1, self._groups, BUCKETS) for count in (self.hits, self.seen))
        kind_hits = hits.sum(1, keepdims=True)
        kind_seen = (seen * self._factor).sum(1, keepdims=True)
        # Ages that few tails have reached: the prior, as far as it held at younger ages.
        held = (_before(kind_hits) + 1) / (_before(kind_seen * _PRIOR) + 1)
        hazard = (kind_hits + PRIOR_TAILS * _PRIOR * np.minimum(1, held)) / (kind_seen + PRIOR_TAILS)
        added = slice(self._first_kinds, None)
        hazard[added] = (kind_hits[added] + PRIOR_TAILS * hazard[0]) / (kind_seen[added] + PRIOR_TAILS)
        expected = (seen * hazard).sum(2, keepdims=True)
        group_hits = hits.sum(2, keepdims=True)
        factor = self._factor = (group_hits + PRIOR_HITS) / (expected + PRIOR_HITS)
        factor[added] = (group_hits[added] + PRIOR_HITS * factor[0]) / (expected[added] + PRIOR_HITS)
        density = _density(np.minimum(0.98, hazard * factor)) * np.array(self.weights)[:, None, None]
        self.level = np.round(LEVELS * np.log(density)).ravel().tolist()
        hits *= self._decay
        seen *= self._decay


def _density(hazard: Table) -> Table:
    """Return the densities at the start of each bucket, the last axis, of tails that are kept as long as is best."""
    left = np.ones((*hazard.shape[:-1], BUCKETS + 1))  # of a tail, at the start of each bucket and at the end
    np.cumprod(1 - hazard, axis=-1, out=left[..., 1:])
    room = np.zeros_like(left)  # that it takes from then on; summed from the end, where it is least
    room[..., -2::-1] = np.cumsum((_WIDTHS * (left[..., :-1] + left[..., 1:]) / 2)[..., ::-1], axis=-1)
    density = np.full_like(hazard, 1e-12)
    for kept in range(1, BUCKETS + 1):  # for so many buckets
        ages = BUCKETS + 1 - kept
        hits = left[..., :ages] - left[..., kept:]
        np.maximum(density[..., :ages], hits / (room[..., :ages] - room[..., kept:]), out=density[..., :ages])
    return density


def _before(table: Table) -> Table:
    """Return the sums over all younger ages."""
    return np.cumsum(table, axis=-1) - table
