"""Hit rates of eviction policies at several sizes of the primary tier, without any other tier.

The command `simulate` calls it, on its thread. What must stay true: curve and simulation give LRU the same hits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.stack_config import load_config
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import Fleet, Simulated, simulate, with_tier

_ALONE = load_config({"namespace": {"model": "any"}, "block": {"bytes": 1}, "primary": {"capacity": 2}})
_SIZES = 10  # default sizes, at most


@dataclass(frozen=True, slots=True)
class HitRate:
    """The share of blocks that a policy hits."""

    policy: str
    capacity_blocks: int
    hit_rate: float
    policy_error: str = ""
    """Why lru replaced the policy, if it did: then the rate is not the policy's."""


def hit_rate(
    policy: str,
    capacity_blocks: int,
    requests: Sequence[Request],
    curve: HitCurve,
    *,
    on_progress: Callable[[int], None] = lambda requests: None,
) -> HitRate:
    """Return the hit rate of a policy, where each request ends before the next one begins.

    `curve` has the hits of LRU without hints. If all blocks fit, every policy has these hits. `on_progress` gets the
    number of requests so far.
    """
    is_on_curve = policy == "lru" and capacity_blocks >= curve.longest_blocks
    skips = any(request.hints is not None and "skip" in request.hints for request in requests)
    if (is_on_curve or capacity_blocks >= curve.distinct_blocks) and not skips:
        return HitRate(policy, capacity_blocks, round(curve.rate(capacity_blocks), 6))
    simulated = _run(policy, capacity_blocks, requests, Fleet(concurrency=1), on_progress)
    return HitRate(policy, capacity_blocks, round(simulated.hit_rate, 6), simulated.policy_error)


@dataclass(frozen=True, slots=True)
class HostRates:
    """Hit rates of engines with private caches, and of one cache of the same total size for all of them."""

    policy: str
    capacity_blocks: int
    private: float
    shared: float
    policy_error: str = ""


def host_rates(
    policy: str,
    capacity_blocks: int,
    requests: Sequence[Request],
    fleet: Fleet,
    *,
    on_progress: Callable[[int], None] = lambda requests: None,
) -> HostRates:
    """Return the hit rates of `fleet`, whose servers are a host's engines. They have `capacity_blocks` together."""
    if capacity_blocks < fleet.servers:
        raise ConfigError(f"expected a block for each engine, found {capacity_blocks}", location="--capacity")
    private = _run(policy, capacity_blocks // fleet.servers, requests, fleet, on_progress)
    shared = _run(policy, capacity_blocks, requests, Fleet(concurrency=fleet.concurrency), on_progress)
    error = private.policy_error or shared.policy_error
    return HostRates(policy, capacity_blocks, round(private.hit_rate, 6), round(shared.hit_rate, 6), error)


def _run(
    policy: str, blocks: int, requests: Sequence[Request], fleet: Fleet, on_progress: Callable[[int], None]
) -> Simulated:
    stack = with_tier(_ALONE, PRIMARY_NAME, capacity=blocks, policy=policy)
    return simulate(stack, requests, fleet, on_progress=on_progress)


def default_sizes(curve: HitCurve) -> list[int]:
    """Return sizes in blocks: each is about twice the one before, and all blocks fit into the last."""
    return sorted({max(1, curve.distinct_blocks >> halvings) for halvings in range(_SIZES)})


@dataclass(frozen=True, slots=True)
class HitCurve:
    """The hits of LRU by capacity.

    Args:
        hits: Hits by capacity in blocks, from 0 to the number of distinct blocks.
        blocks: Blocks that requests asked for.
        longest_blocks: Blocks of the longest prompt. With a smaller capacity the real LRU has fewer than `hits`.
    """

    hits: np.ndarray[Any, np.dtype[np.int64]]
    blocks: int
    longest_blocks: int

    @property
    def distinct_blocks(self) -> int:
        return len(self.hits) - 1

    def rate(self, capacity_blocks: int) -> float:
        return int(self.hits[min(capacity_blocks, self.distinct_blocks)]) / max(self.blocks, 1)


def hit_curve(requests: Sequence[Request]) -> HitCurve:
    """Return the hits of LRU at every size, in one pass over the requests.

    LRU has one order of blocks for all sizes: a cache of n blocks holds the first n (Mattson et al., "Evaluation
    techniques for storage hierarchies", 1970). A block is a hit in every cache that is larger than its *distance*, the
    number of blocks before it in this order. A request moves its blocks to the front, head before tail. So the cache
    always holds whole prefixes, as the primary tier does.

    Blocks with the same last user (a request) are adjacent in the order. The next request takes the first of them. So
    a Fenwick tree (Fenwick, 1994) over requests is enough. It has the number of blocks that each request used last.
    """
    last_user: dict[int, int] = {}  # the number of the request that used a block last, from 1, by block
    tree = [0] * (len(requests) + 1)  # Fenwick tree: for each request, how many blocks it used last

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
            if user is None:  # a miss ends the prefix
                break
            # The blocks of later users come before these blocks. `max` keeps the order if ids are no prefixes.
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
