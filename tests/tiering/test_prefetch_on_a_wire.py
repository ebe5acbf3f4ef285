"""With a real server behind a distant wire, requests that wait for their turn find their blocks when it comes."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque

import numpy as np
import pytest

from tests.support.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.proxy import Direction, FaultProxy, Faults
from tiered_kv.testing.rig import make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

__all__ = ["redis_server"]

BLOCK_BYTES = 4096
PLACES = 2
REQUESTS = 8
BLOCKS = 64
STEP_S = 0.02
ANSWER_STEPS = 20

pytestmark = pytest.mark.slow


def open_on(wire: FaultProxy) -> Stack:
    return open_stack(
        {
            "namespace": {"model": "m"},
            "block": {"bytes": BLOCK_BYTES},
            "primary": {"capacity": 2048 * BLOCK_BYTES},
            "secondary": [{"type": "redis", "url": f"redis://{wire.host}:{wire.port}", **PATIENT}],
        }
    )


def serve(stack: Stack, prompts: list[list[OffloadKey]], *, is_told_early: bool) -> list[float]:
    """Serve requests that come while all places are taken; return the seconds to the first token of each.

    A step takes `STEP_S`; a request has its first token in the step after its blocks were loaded, and keeps its place
    for `ANSWER_STEPS`, as those do that are there before.
    """
    manager = stack.manager
    waiting = deque((ReqContext(f"request-{number}"), keys) for number, keys in enumerate(prompts))
    running = [ANSWER_STEPS] * PLACES
    taken: list[float] = []
    began_s = time.perf_counter()
    for context, keys in waiting:
        manager.on_new_request(context)
        if is_told_early:
            manager.prefetch(keys, context)
    while waiting or running:
        deferred = []
        while waiting and len(running) < PLACES:  # as vLLM: who has to wait for blocks lets others by
            context, keys = waiting.popleft()
            manager.end_prefetch(context)
            if all(manager.lookup_many(keys, context)):
                manager.prepare_load(keys, context)
                manager.complete_load(keys, context)
                manager.on_request_finished(context)
                running.append(ANSWER_STEPS)
                taken.append(time.perf_counter() + STEP_S - began_s)
            else:
                deferred.append((context, keys))
        waiting.extendleft(reversed(deferred))
        manager.on_schedule_end()
        time.sleep(STEP_S if running else 0.001)
        running = [left - 1 for left in running if left > 1]
    return taken


@pytest.mark.full
def test_requests_that_wait_reach_their_first_token_sooner(redis_server: RedisServer) -> None:
    rounds = 3
    prompts = {
        (is_early, each): [make_keys(BLOCKS, f"{is_early} {each} {number}") for number in range(REQUESTS)]
        for each in range(rounds)
        for is_early in (True, False)
    }
    with FaultProxy(("127.0.0.1", redis_server.port)) as wire:
        with open_on(wire) as stack:
            for keys in (keys for each in prompts.values() for keys in each):
                assert stack.put(keys, np.ones((len(keys), BLOCK_BYTES), np.uint8), timeout=60) == len(keys)
        wire.set_faults(Faults(latency_s=0.05), Direction.TO_SERVER)
        wire.set_faults(Faults(latency_s=0.05, bytes_per_s=1.6e6), Direction.TO_CLIENT)
        taken: dict[bool, list[list[float]]] = {True: [], False: []}
        for (is_early, _), each in prompts.items():
            with open_on(wire) as stack:
                taken[is_early].append(serve(stack, each, is_told_early=is_early))
    early, late = (
        {"mean": statistics.median(map(statistics.mean, rows)), "max": statistics.median(map(max, rows))}
        for rows in (taken[True], taken[False])
    )
    print({"early": early, "late": late, "first": [row[0] for rows in taken.values() for row in rows]}, file=sys.stderr)
    assert early["mean"] < late["mean"]
