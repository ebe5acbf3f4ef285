"""Hit rates of eviction policies at several sizes of the primary tier, without any other tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_kv.config.stack_config import load_config
from tiered_kv.workload.request import Request
from tiered_kv.workload.sampling import Sample
from tiered_kv.workload.simulation import Fleet, Outcome, simulate, with_primary
from tiered_kv.workload.stack_distance import HitCurve

_ALONE = load_config({"namespace": {"model": "any"}, "block": {"bytes": 1}, "primary": {"capacity": 2}})
_ONE_BY_ONE = Fleet(concurrency=1)
_SIZES = 10


@dataclass(frozen=True, slots=True)
class HitRate:
    """The share of blocks that a policy hits; off by `error` at most in 95 of 100 samples, 0 where it is exact."""

    policy: str
    capacity_blocks: int
    hit_rate: float
    error: float = 0.0


def hit_rate(
    policy: str,
    capacity_blocks: int,
    requests: Sequence[Request],
    curve: HitCurve,
    sample: Sample | None = None,
    *,
    on_progress: Callable[[int], None] = lambda requests: None,
) -> HitRate:
    """Return what a policy hits.

    Args:
        policy: Its name, as in a stack's file.
        capacity_blocks: Blocks that the primary tier holds.
        requests: In order; each ends before the next one begins.
        curve: What LRU hits of them: every policy does where there is room for all blocks.
        sample: Some of their sessions, to run these alone where that leaves enough room; None to run all requests.
        on_progress: Called with the number of requests that began.

    Raises:
        ConfigError: There is no such policy.
    """
    if policy == "lru" or capacity_blocks >= curve.distinct_blocks:
        return HitRate(policy, capacity_blocks, round(curve.rate(capacity_blocks), 6))
    blocks = 0 if sample is None else sample.capacity(capacity_blocks)
    if sample is None or not blocks:
        return HitRate(policy, capacity_blocks, _run(policy, capacity_blocks, requests, on_progress).hit_rate)
    # LRU is known exactly, so what the sample says of LRU corrects what it says of the policy. The error is told
    # without that: it leaves room for what a small cache does differently, which no sample tells.
    hits = _run(policy, blocks, sample.requests, on_progress).request_hits
    of_lru = _run("lru", blocks, sample.requests).request_hits
    (rate, error), (lru_rate, _) = sample.estimate(hits), sample.estimate(of_lru)
    corrected = min(max(rate + curve.rate(capacity_blocks) - lru_rate, 0.0), 1.0)
    return HitRate(policy, capacity_blocks, round(corrected, 6), round(error, 6))


def _run(
    policy: str, blocks: int, requests: Sequence[Request], on_progress: Callable[[int], None] = lambda requests: None
) -> Outcome:
    return simulate(with_primary(_ALONE, blocks, policy), requests, _ONE_BY_ONE, on_progress=on_progress)


def default_sizes(curve: HitCurve) -> list[int]:
    """Return sizes that double, up to the room for all blocks."""
    return sorted({max(1, curve.distinct_blocks >> halvings) for halvings in range(_SIZES)})
