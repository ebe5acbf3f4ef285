"""Routers: which of several servers gets a request."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle

from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import Request
from tiered_kv.workload.sampling import hash_share, sessions

ROUTERS = ("random", "round-robin", "sticky", "prefix")
_PREFIX_SHARE_MIN = 0.5
"""A server gets a request for its prefix if it had at least this share of the prompt before."""


def routes(router: str, requests: Sequence[Request], servers: int) -> Iterator[int]:
    """Return an iterator over the number of the server of each request, from 0.

    Router "sticky" keeps a session on one server. "prefix" chooses the server that had the longest part of the prompt
    before, if that is half of it, and else the server with the fewest blocks.

    Raises:
        ConfigError: There is no such router.
    """
    if router == "random":
        chance = random.Random(0)
        return (chance.randrange(servers) for _ in requests)
    if router == "round-robin":
        return cycle(range(servers))
    if router == "sticky":
        return (int(hash_share(session) * servers) for session in sessions(requests)[0])
    if router == "prefix":
        return _by_prefix(requests, servers)
    raise ConfigError(f"expected one of {', '.join(ROUTERS)}, found {router!r}", location="--router")


def _by_prefix(requests: Sequence[Request], servers: int) -> Iterator[int]:
    had_last: dict[int, int] = {}  # by block, the server that got it last
    loads = [0] * servers
    for request in requests:
        ids = request.hash_ids
        known = next((at for at, each in enumerate(ids) if each not in had_last), len(ids))
        is_known = known and known >= _PREFIX_SHARE_MIN * len(ids)
        server = had_last[ids[known - 1]] if is_known else min(range(servers), key=loads.__getitem__)
        had_last.update(dict.fromkeys(ids, server))
        loads[server] += len(ids)
        yield server
