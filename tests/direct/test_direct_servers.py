"""Tiers over a host's memory whose servers stop: redis-server, and moto's for S3, each in its own process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.direct.conftest import BLOCK_BYTES, offsets, open_direct
from tests.support.redis_servers import redis_server
from tests.support.s3_entries import s3_entry
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.s3_servers import moto_server

__all__ = ["moto_server", "redis_server"]

COUNT = 64
START, SIZE = 1 << 19, COUNT * BLOCK_BYTES
"""Where loads go."""


@pytest.mark.slow
@pytest.mark.trust
@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_tasks_over_a_frozen_server_end_and_let_the_memory_go(
    kind: str, pool: Any, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("redis_server" if kind == "redis" else "moto_server")
    place = {"type": "redis", "url": server.url} if kind == "redis" else s3_entry(server, server.make_bucket())
    limits = {"lookup_timeout": "1s", "job_timeout": "3s", "breaker_cooldown": "100ms"}
    keys, cut_off, content = make_keys(COUNT), make_keys(COUNT, "cut off"), pool[:SIZE].copy()
    sources, targets = offsets(COUNT), offsets(COUNT, START)
    reports: list[list[bool]] = []
    with open_direct(pool, {**place, **limits}) as tiers:
        assert tiers.wait("store", keys, sources) == [True] * COUNT
        server.freeze()
        try:
            tiers.load(keys, targets, reports.append)
            tiers.store(cut_off, sources, reports.append)
            tiers.contains(make_keys(COUNT, "never asked for"), reports.append)
            wait_until(lambda: len(reports) == 3, what="the end of all tasks")
            pool[START : START + SIZE] = 7
        finally:
            server.thaw()
        assert reports == [[False] * COUNT] * 3
        wait_until(lambda: tiers.wait("contains", keys) == [True] * COUNT, what="an answer of the server")
        assert (pool[START : START + SIZE] == 7).all(), "a late answer was written into the host's memory"
        wait_until(lambda: tiers.wait("load", keys, targets) == [True] * COUNT, what="a load")
        assert np.array_equal(pool[START : START + SIZE], content)
        # The server may carry out what it had not answered: then these are the bytes.
        there = tiers.wait("load", cut_off, targets)
        for start in (number * BLOCK_BYTES for number in range(COUNT) if there[number]):
            assert np.array_equal(
                pool[START + start : START + start + BLOCK_BYTES], content[start : start + BLOCK_BYTES]
            )
        wait_until(lambda: tiers.wait("store", cut_off, sources) == [True] * COUNT, what="a store")
