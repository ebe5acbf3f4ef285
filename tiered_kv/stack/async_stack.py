"""A stack for asyncio programs: each call runs on a thread, and the event loop goes on.

A program awaits the calls on one event loop. The buffers of a call stay in use until its thread has ended, also after a
cancellation.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast, overload

from tiered_kv.received import Received
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.calls import HintsAsGiven, end_of

if TYPE_CHECKING:
    from tiered_kv.server.connect import HostStack
    from tiered_kv.stack.buffers import AnyBuffer
    from tiered_kv.stack.open import Stack
    from tiered_kv.stack.values import Values

T = TypeVar("T")


class AsyncStack:
    """An open stack with calls to await. Use it on one event loop; other threads may use the stack itself.

    Each call is one of `Stack`, with its arguments, results and errors. It runs on a thread of the event loop's default
    executor, which limits how many run at a time. `timeout` counts also while the call waits for a thread.

    A cancelled call raises `CancelledError` when it has ended, within its `timeout`. So nothing uses the buffers of
    `put` and `get` any more, and nothing stays reserved. A shorter `asyncio.timeout` does not end it earlier. If no
    thread has begun a cancelled call, it raises at once, and never begins. Only `close` runs in any case.

    Args:
        stack: The stack, which `close` closes.
    """

    def __init__(self, stack: Stack | HostStack) -> None:
        self.stack = stack

    async def put(
        self,
        keys: Sequence[bytes],
        blocks: AnyBuffer,
        *,
        timeout: float = 10.0,
        hints: HintsAsGiven = None,
        epoch: int | None = None,
    ) -> int:
        """See `Stack.put`."""
        epoch = self.stack.epoch if epoch is None else epoch  # the epoch of now: a thread may be free later
        return await _finish(
            lambda left_s: self.stack.put(keys, blocks, timeout=left_s, hints=hints, epoch=epoch), timeout
        )

    @overload
    async def get(
        self,
        keys: Sequence[bytes],
        out: None = None,
        timeout: float = ...,
        *,
        hints: HintsAsGiven = ...,
        received: Received | None = ...,
    ) -> Blocks: ...

    @overload
    async def get(
        self,
        keys: Sequence[bytes],
        out: AnyBuffer,
        timeout: float = ...,
        *,
        hints: HintsAsGiven = ...,
        received: Received | None = ...,
    ) -> int: ...

    async def get(
        self,
        keys: Sequence[bytes],
        out: AnyBuffer | None = None,
        timeout: float = 1.0,
        *,
        hints: HintsAsGiven = None,
        received: Received | None = None,
    ) -> Blocks | int:
        """See `Stack.get`."""
        get = partial(self.stack.get, keys, hints=hints, received=received)
        if out is None:
            return await _finish(lambda left_s: get(timeout=left_s), timeout)
        return await _finish(lambda left_s: get(out, left_s), timeout)

    async def contains(self, keys: Sequence[bytes], timeout: float = 1.0) -> int:
        """See `Stack.contains`."""
        return await _finish(lambda left_s: self.stack.contains(keys, left_s), timeout)

    async def prefetch(self, keys: Sequence[bytes], timeout: float = 1.0, *, hints: HintsAsGiven = None) -> int:
        """See `Stack.prefetch`."""
        return await _finish(lambda left_s: self.stack.prefetch(keys, left_s, hints=hints), timeout)

    @property
    def values(self) -> AsyncValues:
        """See `Stack.values`."""
        return AsyncValues(self.stack.values)

    async def flush(self, timeout: float = 10.0) -> bool:
        """See `Stack.flush`."""
        return await _finish(self.stack.flush, timeout)

    async def close(self, timeout: float = 5.0) -> None:
        """See `Stack.close`."""
        await _finish(lambda _: self.stack.close(timeout), timeout, always=True)

    async def __aenter__(self) -> AsyncStack:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncValues:
    """The values of an `AsyncStack`: the calls of `Values`, to await."""

    def __init__(self, values: Values) -> None:
        self._values = values

    @property
    def bytes_max(self) -> int:
        """See `Values.bytes_max`."""
        return self._values.bytes_max

    async def put(self, key: bytes, value: AnyBuffer, *, timeout: float = 10.0, hints: HintsAsGiven = None) -> bool:
        """See `Values.put`."""
        return await self.put_many({key: value}, timeout=timeout, hints=hints) == 1

    async def put_many(
        self,
        values: Mapping[bytes, AnyBuffer],
        *,
        timeout: float = 10.0,
        hints: HintsAsGiven = None,
        epoch: int | None = None,
    ) -> int:
        """See `Values.put_many`."""
        epoch = self._values.epoch if epoch is None else epoch  # as of `AsyncStack.put`
        put = partial(self._values.put_many, values, hints=hints, epoch=epoch)
        return await _finish(lambda left_s: put(timeout=left_s), timeout)

    async def get(self, key: bytes, timeout: float = 1.0, *, hints: HintsAsGiven = None) -> bytes | None:
        """See `Values.get`."""
        return (await self.get_many([key], timeout, hints=hints))[0]

    async def get_many(
        self, keys: Sequence[bytes], timeout: float = 1.0, *, hints: HintsAsGiven = None
    ) -> list[bytes | None]:
        """See `Values.get_many`."""
        return await _finish(lambda left_s: self._values.get_many(keys, left_s, hints=hints), timeout)

    async def contains(self, key: bytes, timeout: float = 1.0) -> bool:
        """See `Values.contains`."""
        return await _finish(lambda left_s: self._values.contains(key, left_s), timeout)


async def _finish(call: Callable[[float], T], timeout: float, *, always: bool = False) -> T:
    """Return the result of `call`, which runs on a thread with the rest of `timeout`.

    A cancellation waits for the call's end, if the call has begun or `always` is set.
    """
    end_s = end_of(timeout)
    claim = threading.Lock()  # taken by the thread that begins the call, or by a cancellation before

    def begin() -> T | None:
        return call(max(0.0, end_s - time.monotonic())) if claim.acquire(blocking=False) else None

    running = asyncio.get_running_loop().run_in_executor(None, begin)
    is_cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])  # unlike `await running`, it leaves the future alone when it is cancelled
        except asyncio.CancelledError:
            is_cancelled = True
            if not always and claim.acquire(blocking=False):
                raise
    if is_cancelled:
        running.exception()  # asyncio logs an exception that nobody reads
        raise asyncio.CancelledError
    return cast("T", running.result())
