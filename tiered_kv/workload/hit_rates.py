"""Hit rates of eviction policies at several sizes of the primary tier, without any other tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_kv.stack_config import PRIMARY_TIER_NAME, load_config
from tiered_kv.workload.request import Request
from tiered_kv.workload.sampling import Sample
from tiered_kv.workload.simulation import Fleet, run_servers, with_tier
from tiered_kv.workload.stack_distance import HitCurve, hit_curve
from tiered_kv.workload.tally import Tally

_ALONE = load_config({"namespace": {"model": "any"}, "block": {"bytes": 1}, "primary": {"capacity": 2}})
_SIZES = 10


@dataclass(frozen=True, slots=True)
class HitRate:
    """The share of blocks that a policy hits. In 95 of 100 samples it is off by at most `error`, 0 if exact."""

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
    """Return the hit rate of a policy, where each request ends before the next one begins.

    `curve` is that of LRU; with room for all blocks every policy hits the same. A `sample` runs in place of all
    requests, unless its capacity is too small. `on_progress` gets the number of requests so far.
    """
    blocks = 0 if sample is None else sample.capacity(capacity_blocks)
    error = 0.0
    is_on_curve = policy == "lru" and capacity_blocks >= curve.longest_blocks
    if is_on_curve or capacity_blocks >= curve.distinct_blocks:
        rate = curve.rate(capacity_blocks)
    elif sample is None or not blocks:
        tally = _run(policy, capacity_blocks, requests, on_progress)
        rate = sum(tally.request_hits) / max(tally.blocks, 1)
    else:
        # The hit rate of LRU is known exactly, so the sample's error for LRU corrects the policy's rate. The reported
        # error ignores the correction: it allows for the different behaviour of a smaller cache.
        rate, error = sample.estimate(_run(policy, blocks, sample.requests, on_progress).request_hits)
        corrected = rate + curve.rate(capacity_blocks) - hit_curve(sample.requests).rate(blocks)
        rate = min(max(corrected, 0.0), 1.0)
    return HitRate(policy, capacity_blocks, round(rate, 6), round(error, 6))


def _run(policy: str, blocks: int, requests: Sequence[Request], on_progress: Callable[[int], None]) -> Tally:
    stack = with_tier(_ALONE, PRIMARY_TIER_NAME, capacity=blocks, policy=policy)
    (server,) = run_servers(stack, requests, Fleet(concurrency=1), on_progress)
    return server.replay.tally


def default_sizes(curve: HitCurve) -> list[int]:
    """Return sizes that double, up to the room for all blocks."""
    return sorted({max(1, curve.distinct_blocks >> halvings) for halvings in range(_SIZES)})
