"""Samples of a trace by session, to simulate a large cache by a small one.

After Waldspurger et al., "Efficient MRC Construction with SHARDS" (FAST 2015). A hash decides whether a session is in
the sample, and the cache shrinks by the same share. Whole sessions are sampled, so that prefixes stay whole. Requests
of a session share a block that few others have. Blocks of many requests, as of a system prompt, are in every sample,
with room for all of them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import Request

_COMMON_REQUESTS_MIN = 50
_COMMON_SHARE = 0.01
"""A block that more requests than both of these have belongs to no session."""
_CAPACITY_MIN = 500
"""A smaller cache behaves differently."""
_ROUGH_S = (1, 4, 16, 64, 256, 1024)
"""The times of `hints_from_sessions`."""
_SURE = 1.96
"""Standard errors to either side that hold the true value in 95 of 100 samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Some sessions of a trace.

    Args:
        requests: Their requests, in order.
        roots: The session of each.
        rate: Their share of the blocks of all sessions.
        common_blocks: Blocks that belong to no session.
    """

    requests: list[Request]
    roots: list[int]
    rate: float
    common_blocks: int

    def capacity(self, capacity_blocks: int) -> int:
        """Return the sample's capacity for a trace with `capacity_blocks`; 0 if it is too small to be compared."""
        of_sessions = max(0, capacity_blocks - self.common_blocks)
        scaled = min(capacity_blocks, self.common_blocks) + round(self.rate * of_sessions)
        return scaled if scaled >= _CAPACITY_MIN else 0

    def estimate(self, hits: Sequence[int]) -> tuple[float, float]:
        """Return the hit rate of the whole trace, and its error bound for 95 of 100 samples.

        `hits` are the blocks of each request of the sample that were hits.
        """
        blocks = sum(len(request.hash_ids) for request in self.requests)
        rate = sum(hits) / max(blocks, 1)
        residuals: defaultdict[int, float] = defaultdict(float)
        for root, hit, request in zip(self.roots, hits, self.requests, strict=True):
            residuals[root] += hit - rate * len(request.hash_ids)
        # The linearized variance of a ratio of two sums over a sample of sessions.
        variance = sum(value * value for value in residuals.values()) * (1 - self.rate)
        return rate, _SURE * math.sqrt(variance) / max(blocks, 1)


def sessions(requests: Sequence[Request]) -> tuple[list[int], set[int]]:
    """Return the session of each request, and the blocks that belong to no session.

    The first block that only the session has identifies it; if a request has none, its last block.
    """
    uses = Counter(each for request in requests for each in request.hash_ids)
    limit = max(_COMMON_REQUESTS_MIN, _COMMON_SHARE * len(requests))
    common = {each for each, count in uses.items() if count > limit}
    prompts = (request.hash_ids for request in requests)
    return [next((each for each in ids if each not in common), ids[-1] if ids else 0) for ids in prompts], common


def hints_from_sessions(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the hints of clients that know roughly when their session returns, and when it ends."""
    roots, _ = sessions(requests)
    names = [request.session or root for request, root in zip(requests, roots, strict=True)]
    returns_ms: dict[str | int, int] = {}
    hinted = []
    for request, name in zip(reversed(requests), reversed(names), strict=True):
        hints: dict[str, object] = {"ttl": 0}
        if name in returns_ms:
            wait_s = max(returns_ms[name] - request.timestamp_ms, 1) / 1000
            hints = {"expect_return": min(_ROUGH_S, key=lambda rough_s: abs(math.log(wait_s / rough_s)))}
        returns_ms[name] = request.timestamp_ms
        hinted.append(replace(request, hints=hints))
    return hinted[::-1]


def draw(requests: Sequence[Request], rate: float) -> Sample:
    """Return about `rate` of the sessions of a trace, the same each time; at least one, or raise ConfigError."""
    roots, common = sessions(requests)
    taken = [(request, root) for request, root in zip(requests, roots, strict=True) if hash_share(root) < rate]
    every = {each for request in requests for each in request.hash_ids} - common
    some = {each for request, _ in taken for each in request.hash_ids} - common
    if not some:
        raise ConfigError(f"a share of {rate} of this trace is no session: take a larger one", location="--sample")
    return Sample([request for request, _ in taken], [root for _, root in taken], len(some) / len(every), len(common))


def hash_share(number: int) -> float:
    """Return a hash of `number`, from 0 to 1."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
