"""A stack in an asyncio program: calls are awaited, and cancelled calls leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.faulty import FourMethodTier, Gate
from tests.support.stacks import PATIENT, Register, stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import ShutdownError
from tiered_kv.stack.async_stack import AsyncStack
from tiered_kv.stack.open import open_stack

BLOCK_BYTES = 4096
HASHES = [b"one", b"two", b"three"]
CONTENT = np.arange(3 * BLOCK_BYTES, dtype=np.uint16).astype(np.uint8).reshape(3, BLOCK_BYTES)
WAIT_S = 60.0


def run(program: Callable[[AsyncStack], Awaitable[None]], *tiers: dict[str, object]) -> None:
    async def main() -> None:
        async with AsyncStack(open_stack(stack_of(*tiers))) as stack:
            await program(stack)

    asyncio.run(main())


@pytest.fixture
def undecided(register: Register, gate: Gate) -> dict[str, object]:
    """A tier that answers lookups while its gate is open."""

    class Undecided(FourMethodTier):
        def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
            return False if gate.is_open else None

    gate.close()
    register("undecided", Undecided)
    return {"type": "undecided", **PATIENT}


def test_blocks_come_back_and_are_counted() -> None:
    async def program(stack: AsyncStack) -> None:
        assert await stack.put(HASHES[:2], CONTENT[:2].tobytes(), timeout=WAIT_S) == 2
        assert await stack.flush(WAIT_S)
        assert await stack.contains(HASHES, WAIT_S) == 2
        assert await stack.prefetch(HASHES, WAIT_S) == 2
        assert np.array_equal(await stack.get(HASHES, timeout=WAIT_S), CONTENT[:2])
        out = bytearray(3 * BLOCK_BYTES)
        assert await stack.get(HASHES, out, WAIT_S) == 2
        assert out[: 2 * BLOCK_BYTES] == CONTENT[:2].tobytes()

    run(program, {"type": "memory", "capacity": "1MiB", **PATIENT})


def test_errors_are_those_of_the_stack_also_after_close() -> None:
    async def program(stack: AsyncStack) -> None:
        with pytest.raises(ValueError, match="3 blocks of 4096 bytes"):
            await stack.put(HASHES, b"")
        await stack.close()
        with pytest.raises(ShutdownError):
            await stack.get(HASHES)

    run(program)


def test_the_event_loop_goes_on_while_a_call_waits(undecided: dict[str, object], gate: Gate) -> None:
    async def program(stack: AsyncStack) -> None:
        call = asyncio.create_task(stack.get(HASHES, timeout=WAIT_S))
        while stack.stack._calls == 0:
            await asyncio.sleep(0.001)
        gate.open()
        assert (await call).shape == (0, BLOCK_BYTES)

    run(program, undecided)


def test_a_cancelled_call_ends_before_it_raises(undecided: dict[str, object]) -> None:
    async def program(stack: AsyncStack) -> None:
        out = bytearray(3 * BLOCK_BYTES)
        call = asyncio.create_task(stack.get(HASHES, out, 0.2))
        while stack.stack._calls == 0:
            await asyncio.sleep(0.001)
        for _ in range(2):
            call.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert stack.stack._calls == 0
        del out[:]  # which Python refuses while a call uses it

    run(program, undecided)


def test_a_call_that_is_cancelled_before_a_thread_is_free_never_begins() -> None:
    async def program(stack: AsyncStack) -> None:
        end = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(end.wait, WAIT_S))
        await asyncio.sleep(0)
        call = asyncio.create_task(stack.put(HASHES, CONTENT))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        end.set()
        assert await busy
        assert await stack.contains(HASHES) == 0

    run(program)


def test_a_cancelled_close_closes_the_stack_also_if_it_has_not_begun() -> None:
    async def program(stack: AsyncStack) -> None:
        end = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(end.wait, WAIT_S))
        await asyncio.sleep(0)
        closing = asyncio.create_task(stack.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await busy
        with pytest.raises(ShutdownError):
            await stack.contains(HASHES)

    run(program)
