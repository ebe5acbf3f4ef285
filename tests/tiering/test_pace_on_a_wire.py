"""With a real server behind a slow wire, what is computed sooner is not loaded, and what is worth the way is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.base import OffloadKey
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.proxy import Direction, FaultProxy, Faults
from tiered_kv.testing.rig import make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

__all__ = ["redis_server"]

BLOCK_BYTES = 4096
BLOCK_TOKENS = 16
PROMPTS = {size: make_keys(size, f"prompt of {size}") for size in (4, 48, 64, 96, 200, 256)}
WAIT_S = 60.0

pytestmark = pytest.mark.slow


@pytest.fixture
def wire(redis_server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
        yield proxy


def open_on(wire: FaultProxy, computed_block_s: float | None) -> Stack:
    config: dict[str, object] = {
        "namespace": {"model": "m"},
        "block": {"bytes": BLOCK_BYTES, "tokens": BLOCK_TOKENS},
        "primary": {"capacity": 1024 * BLOCK_BYTES, "request_wait": WAIT_S},
        "secondary": [{"type": "redis", "url": f"redis://{wire.host}:{wire.port}", **PATIENT}],
    }
    if computed_block_s is not None:
        config["prefill"] = {"tokens_per_s": round(BLOCK_TOKENS / computed_block_s)}
    return open_stack(config)


def get(stack: Stack, keys: list[OffloadKey]) -> int:
    return stack.get(keys, np.empty((len(keys), BLOCK_BYTES), np.uint8), timeout=WAIT_S)


@pytest.fixture
def stored(wire: FaultProxy) -> None:
    """All prompts are on the server, and in nobody's memory."""
    with open_on(wire, None) as stack:
        for keys in PROMPTS.values():
            assert stack.put(keys, np.ones((len(keys), BLOCK_BYTES), np.uint8), timeout=WAIT_S) == len(keys)


@pytest.mark.usefixtures("stored")
def test_a_short_prompt_is_computed_and_a_long_one_comes_over_a_distant_wire(wire: FaultProxy) -> None:
    with open_on(wire, computed_block_s=0.01) as stack:
        wire.set_faults(Faults(latency_s=0.05))
        for size in (200, 64, 96):
            assert get(stack, PROMPTS[size]) == size, "nothing is known of the wire"
        assert get(stack, PROMPTS[4]) == 0, "40 ms to compute, and 100 to fetch"
        assert get(stack, PROMPTS[256]) == 256, "2.5 s to compute"
        assert stack.counters()["redis"]["too_slow_blocks_total"] == 4


@pytest.mark.usefixtures("stored")
def test_nothing_comes_over_a_wire_that_is_slower_than_computing(wire: FaultProxy) -> None:
    with open_on(wire, computed_block_s=0.005) as stack:
        wire.set_faults(Faults(bytes_per_s=8e4), Direction.TO_CLIENT)
        for size in (64, 48, 96):
            assert get(stack, PROMPTS[size]) == size
        assert [get(stack, PROMPTS[size]) for size in (4, 200, 256)] == [0, 0, 0]
        assert stack.counters()["redis"]["loaded_blocks_total"] == 64 + 48 + 96
