"""Estimates of hit density: expected hits for the room and time that blocks take, by their group and age.

The policy `density` asks it on the scheduler's thread, and nvme's `Worth` on the reclaimer's. The estimates decide only
which blocks are evicted first; no byte depends on them.

The unit is called a tail here: the policy `density` keeps or evicts tails of prompts, and nvme small groups of blocks.

The hazard is the chance that a tail returns at some age. It is the hazard of the tail's kind at this age, times a
factor of its group (proportional hazards: D. R. Cox, 1972). The density at an age is the chance that the tail returns
while it is kept, divided by the expected time that it stays. The estimate keeps a tail for the time with the highest
density.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]

AGES_PER_TURNOVER: Final = 8
"""Units of age in the time in which the tier is written once.

With 4 and 16 the hits are the same within 3 %; with 2 a small tier lost 3 %.
"""
BUCKETS: Final = 19
"""Buckets of age: the first unit, then two for each doubling, up to 64 turnovers of the tier.

With one for each doubling, hits were up to 1 % fewer.
"""
EDGES: Final = [0.0, *(2.0 ** (bucket / 2) for bucket in range(BUCKETS))]
"""The age at which each bucket begins, and the end of the last one."""
DECAY: Final = 0.97
"""Factor of the evidence at each computation of the densities: the evidence halves in 23 computations."""
PRIOR_TAILS: Final = 2.0
"""Weight of the prior in each bucket, in tails. With 10 the hits are the same within 1 %, also for `PRIOR_HITS`."""
PRIOR_HITS: Final = 4.0
"""Weight of the prior in each group, in hits."""
LEVELS: Final = 4.0
"""Levels for each factor of e. Estimates are no more precise, so densities within about a quarter count as equal."""
COLD_AGE: Final = 1.0
"""In units of age. The prior's density falls with the root of this age plus the tail's age: LRU's order."""
_PRIOR: Final[Table] = 1 - np.sqrt((COLD_AGE + np.array(EDGES[:-1])) / (COLD_AGE + np.array(EDGES[1:])))
"""The hazard of each bucket in the prior."""
_WIDTHS: Final[Table] = np.diff(EDGES)


class HitDensity:
    """Counts of tails and of their returns, and the densities computed from them.

    A cell is a group at an age, with the number `group * BUCKETS + bucket`. Each of the `kinds` kinds of tails has its
    own hazard and `groups` groups of its own. Groups are numbered kind by kind. `decay` is the factor of the evidence
    at each computation.
    """

    def __init__(self, kinds: int, groups: int, *, decay: float = DECAY) -> None:
        self._decay = decay
        self._first_kinds = kinds
        self._priors: list[int] = []  # one for each kind
        self._groups = groups
        self.seen = array("d")  # tails that reached a cell, without the parts that were used before
        self.hits = array("d")  # the parts of them that a request has used there
        self._factor: Table = np.ones((0, groups, 1))
        self.level: list[float] = []  # the density of each cell, in steps of its logarithm
        self.weights: list[float] = []  # the value of a hit of each kind
        for _ in range(kinds):
            self.add_kind()
        self.learn()

    def add_kind(self, prior: int = 0) -> int:
        """Add a kind, whose cells follow all others, and return its number. `learn` computes the cells' levels.

        `prior` is the kind from which the new one starts: the first kind, or a kind whose own prior is the first.
        """
        empty = array("d", bytes(8 * self._groups * BUCKETS))
        self.hits, self.seen = self.hits + empty, self.seen + empty
        self._factor = np.concatenate([self._factor, np.ones((1, self._groups, 1))])
        self.weights.append(1.0)
        self._priors.append(prior)
        return len(self.weights) - 1

    def learn(self) -> None:
        """Compute the densities from the counts, and decay the counts."""
        hits, seen = (np.frombuffer(count).reshape(-1, self._groups, BUCKETS) for count in (self.hits, self.seen))
        kind_hits = hits.sum(1, keepdims=True)
        kind_seen = (seen * self._factor).sum(1, keepdims=True)
        # At ages that few tails have reached, the prior counts, corrected by its error at younger ages (large tiers).
        held = (_before(kind_hits) + 1) / (_before(kind_seen * _PRIOR) + 1)
        hazard = (kind_hits + PRIOR_TAILS * _PRIOR * np.minimum(1, held)) / (kind_seen + PRIOR_TAILS)
        added = slice(self._first_kinds, None)
        priors = self._priors[added]
        for _ in range(2):  # the second pass serves kinds whose prior is an added kind
            hazard[added] = (kind_hits[added] + PRIOR_TAILS * hazard[priors]) / (kind_seen[added] + PRIOR_TAILS)
        expected = (seen * hazard).sum(2, keepdims=True)
        group_hits = hits.sum(2, keepdims=True)
        factor = self._factor = (group_hits + PRIOR_HITS) / (expected + PRIOR_HITS)
        for _ in range(2):
            factor[added] = (group_hits[added] + PRIOR_HITS * factor[priors]) / (expected[added] + PRIOR_HITS)
        density = _density(np.minimum(0.98, hazard * factor)) * np.array(self.weights)[:, None, None]
        self.level = np.round(LEVELS * np.log(density)).ravel().tolist()
        hits *= self._decay
        seen *= self._decay


def _density(hazard: Table) -> Table:
    """Return the densities at the start of each bucket (the last axis), for the best time of keeping."""
    left = np.ones((*hazard.shape[:-1], BUCKETS + 1))  # part without a return, at the start of each bucket and the end
    np.cumprod(1 - hazard, axis=-1, out=left[..., 1:])
    room = np.zeros_like(left)  # taken from then on; summed from the end, where it is least
    room[..., -2::-1] = np.cumsum((_WIDTHS * (left[..., :-1] + left[..., 1:]) / 2)[..., ::-1], axis=-1)
    density = np.full_like(hazard, 1e-12)
    for kept in range(1, BUCKETS + 1):  # number of buckets
        ages = BUCKETS + 1 - kept
        hits = left[..., :ages] - left[..., kept:]
        np.maximum(density[..., :ages], hits / (room[..., :ages] - room[..., kept:]), out=density[..., :ages])
    return density


def _before(table: Table) -> Table:
    """Return the sums over all younger ages."""
    return np.cumsum(table, axis=-1) - table
