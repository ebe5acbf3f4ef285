"""The hits of LRU at every size, in one pass over the requests.

LRU keeps its blocks in one order, whatever its size: a cache of n blocks holds the first n of them (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970). So a block is a hit in every cache that is larger than its
*distance*, the number of blocks before it in this order. After a request its blocks are the first, head before tail.
So what is held is always a set of whole prefixes, as in the primary tier.

The blocks that a request was the last to use stand together in the order, and the next request takes the head of them.
So it is enough to count how many blocks each request is the last user of, in a Fenwick tree (Fenwick, 1994).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from tiered_kv.workload.request import Request


@dataclass(frozen=True, slots=True)
class HitCurve:
    """What LRU hits by its capacity.

    Args:
        hits: Blocks that are hits with room for so many blocks, from 0 to the number of distinct blocks.
        blocks: Blocks that requests asked for.
        longest_blocks: Those of the longest prompt. With less room, the real LRU hits less than this says.
    """

    hits: np.ndarray[Any, np.dtype[np.int64]]
    blocks: int
    longest_blocks: int

    @property
    def distinct_blocks(self) -> int:
        """Distinct blocks: more room than for these is of no use."""
        return len(self.hits) - 1

    def rate(self, capacity_blocks: int) -> float:
        """Return the share of blocks that are hits with room for `capacity_blocks`."""
        return int(self.hits[min(capacity_blocks, self.distinct_blocks)]) / max(self.blocks, 1)


def hit_curve(requests: Sequence[Request]) -> HitCurve:
    """Return what LRU hits at every size."""
    last_user: dict[int, int] = {}  # of each block, the number of the request that used it last, from 1
    tree = [0] * (len(requests) + 1)  # how many blocks each request is the last user of

    def add(number: int, change: int) -> None:
        while number < len(tree):
            tree[number] += change
            number += number & -number

    def sum_to(number: int) -> int:
        total = 0
        while number:
            total += tree[number]
            number &= number - 1
        return total

    distances = array("q")
    for number, request in enumerate(requests, 1):
        users = groupby(map(last_user.get, request.hash_ids))
        runs = [(user, len(list(blocks))) for user, blocks in users]
        distance = -1
        for user, length in runs:
            if user is None:  # the blocks behind one that nobody has used are of no use
                break
            # The blocks of later users stand before these. A trace that is no set of prefixes still gets an order.
            distance = max(distance + 1, len(last_user) - sum_to(user))
            distances.extend(range(distance, distance + length))
            distance += length - 1
        for user, length in runs:
            if user is not None:
                add(user, -length)
        add(number, len(request.hash_ids))
        last_user.update(dict.fromkeys(request.hash_ids, number))
    counts = np.bincount(np.frombuffer(distances, dtype=np.int64), minlength=len(last_user))
    hits = np.concatenate([[0], np.cumsum(counts)[: len(last_user)]])
    prompts = [len(request.hash_ids) for request in requests]
    return HitCurve(hits, sum(prompts), max(prompts, default=0))
