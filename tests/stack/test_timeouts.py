"""What the timeout of a call means, in each of them: 0, a negative one, infinity, and what is no number of seconds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiered_kv
from tests.support import host_server
from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier
from tests.support.stacks import PATIENT, Register, stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.stack.async_stack import AsyncStack
from tiered_kv.stack.open import open_stack
from tiered_kv.tiering.base import TierSpec

BLOCK_BYTES = 4096
HASHES = [b"one", b"two"]
BLOCKS = np.ones((2, BLOCK_BYTES), np.uint8)
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "put": lambda stack, timeout: stack.put(HASHES, BLOCKS, timeout=timeout),
    "get": lambda stack, timeout: len(stack.get(HASHES, timeout=timeout)),
    "contains": lambda stack, timeout: stack.contains(HASHES, timeout=timeout),
    "prefetch": lambda stack, timeout: stack.prefetch(HASHES, timeout=timeout),
    "flush": lambda stack, timeout: stack.flush(timeout=timeout),
}
ODD = [None, math.nan, "1", [1.0]]


@pytest.fixture(params=["stack", "host"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        if request.param == "host":
            served = stack.enter_context(host_server.serving(tmp_path))
            yield stack.enter_context(tiered_kv.connect(served.address))
        else:
            yield stack.enter_context(open_stack(stack_of({"type": "memory", "capacity": "1MiB", **PATIENT})))


@pytest.mark.one_quick(3)
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_what_is_no_number_of_seconds_is_an_error_and_ends_nothing(opened: Any, odd: Any) -> None:
    error = ValueError if isinstance(odd, float) else TypeError
    for call in CALLS.values():
        with pytest.raises(error, match="number of seconds"):
            call(opened, odd)
    with pytest.raises(error, match="number of seconds"):
        opened.close(odd)
    assert CALLS["put"](opened, 60) == 2

    async def use() -> None:
        with pytest.raises(error, match="number of seconds"):
            await AsyncStack(opened).get(HASHES, timeout=odd)
        assert len(await AsyncStack(opened).get(HASHES, timeout=math.inf)) == 2

    asyncio.run(use())


@pytest.mark.parametrize("timeout", [0, -1, -math.inf, np.float32(0), math.inf], ids=repr)
def test_what_is_ready_comes_whatever_the_timeout(timeout: Any) -> None:
    with open_stack(stack_of(blocks=32)) as stack:
        for name in ("put", "get", "contains", "prefetch"):
            assert CALLS[name](stack, timeout) == 2
        assert stack.flush(timeout)


def test_without_time_no_call_waits_for_a_tier(register: Register, gate: Gate) -> None:
    class Silent(FourMethodTier):
        def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
            return None

    register("silent", Silent)
    with open_stack(stack_of({"type": "silent", **PATIENT})) as stack:
        for timeout in (0, -1, -math.inf):
            for name in ("get", "contains", "prefetch"):
                assert CALLS[name](stack, timeout) == 0


def test_a_put_whose_time_is_over_stores_no_more_than_memory_holds(register: Register, gate: Gate) -> None:
    """Its tier stores nothing meanwhile. Each further block would evict one before it, and so count none."""

    class Held(HeldJobsTier):
        def __init__(self, spec: TierSpec, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type), gate)

    register("held", Held)
    gate.close()
    with open_stack(stack_of({"type": "held", "store_budget": 4 * BLOCK_BYTES, **PATIENT})) as stack:
        rows = stack.region.num_blocks
        hashes = [bytes([number]) * 8 for number in range(8 * rows)]
        assert stack.put(hashes, np.ones((8 * rows, BLOCK_BYTES), np.uint8), timeout=0) == rows
        assert len(stack.get(hashes, timeout=60)) == rows
        gate.open()
