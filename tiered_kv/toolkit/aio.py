"""The base of tiers that use an asyncio client.

The scheduler's thread queues jobs and takes results (`queued`). One thread with an event loop calls the author's
coroutines. No coroutine touches a block after its part was reported. It is a module of its own, so that only its users
load asyncio.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ResourceError
from tiered_kv.reasons import Reason
from tiered_kv.system.step import give_way
from tiered_kv.system.threads import DaemonThreads, start_thread
from tiered_kv.toolkit.jobs import Outcome, Part, checked_outcome, checked_presence
from tiered_kv.toolkit.queued import QueuedTier, block_bytes_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_THREADS_MAX = 32  # threads for `asyncio.to_thread`; asyncio itself would start no more


async def uninterrupted(work: Awaitable[T]) -> T:
    """Await `work` to its end. If the caller is cancelled meanwhile, raise the cancellation after that end.

    Cancelling a coroutine that awaits `asyncio.to_thread(...)` or a file of aiofiles ends the waiting, not the work. So
    await all such work that uses blocks of the primary tier through this function. Call it on the event loop's thread.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # an error that is not retrieved would be printed
    raise cancellation


class _EventLoop(asyncio.SelectorEventLoop):
    """An event loop whose thread pool never runs a call that it has refused; see `DaemonThreads`.

    A loop that got no file descriptors counts as closed, because asyncio could not close it.
    """

    _is_made = False

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        try:
            super().__init__(selector)
        except BaseException:
            selector.close()
            raise
        self._is_made = True
        self._threads = DaemonThreads("tiered-kv-to-thread", _THREADS_MAX)

    def is_closed(self) -> bool:
        return not self._is_made or super().is_closed()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        return super().run_in_executor(executor or self._threads, func, *args)

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


class AsyncTier(QueuedTier):
    """A tier for an author who writes coroutines. They all run on one event loop, in a daemon thread.

    Jobs are cut into parts. As many parts run at once as `blocks_in_flight_max` allows. Lookups go before loads and
    loads before stores, but none starves the others. Stores leave room for one part of a load. An exception fails the
    part it was raised in.

    A coroutine that has not returned by the deadline of its job is cancelled. Its job is reported when the coroutine
    has ended, because until then it may write into its blocks. Nothing may block the event loop: to compress or hash
    megabytes use `uninterrupted(asyncio.to_thread(...))`, or build on `BlockingTier`.

    Args:
        blocks_in_flight_max: Blocks in running parts; at least 1. Lookups do not count.
        shutdown_timeout_s: How long `shutdown` waits. After half of it, running coroutines are cancelled.
        offloading_spec, primary_kv_view, tier_type, part_bytes, lookup_timeout_s: As in `BlockingTier`.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        blocks_in_flight_max: int = 64,
        part_bytes: int = 1 << 20,
        lookup_timeout_s: float = 1.0,
        shutdown_timeout_s: float = 2.0,
    ) -> None:
        if blocks_in_flight_max < 1:
            raise ValueError(f"blocks_in_flight_max must be at least 1, not {blocks_in_flight_max}")
        part_blocks = max(1, min(part_bytes // block_bytes_of(primary_kv_view), blocks_in_flight_max))
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            part_blocks=part_blocks,
            stores_running_max=max(1, blocks_in_flight_max // part_blocks - 1),
            lookup_timeout_s=lookup_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
        )
        self._blocks_in_flight_max = blocks_in_flight_max
        self._loop_thread: threading.Thread | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._is_wake_pending = True  # whether the loop will look into the queue anyway; it does when it begins
        # Owned by the loop's thread.
        self._part_tasks: set[asyncio.Task[None]] = set()
        self._blocks_in_flight = 0
        self._client_is_open = False
        self._client_opening = asyncio.Lock()
        self._loop_stop = asyncio.Event()

    # The author writes these coroutines. All run on the event loop.

    async def open(self) -> None:
        """Connect; awaited before the first use. If it raises, that use fails, and the next use tries again."""
        return

    @abstractmethod
    async def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        """See `BlockingTier.store_blocks`."""

    @abstractmethod
    async def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        """See `BlockingTier.load_blocks`. If cancelled, end once nothing writes to `blocks`: see `uninterrupted`."""

    @abstractmethod
    async def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """See `BlockingTier.contains_blocks`."""

    async def close(self) -> None:
        """Disconnect; awaited once, if `open` succeeded, when nothing else runs."""
        return

    # Any thread.

    def _wake(self) -> None:
        if self._loop_thread is not threading.current_thread() and not self._is_wake_pending:
            # One call for many parts: each call writes to the loop's pipe. The loop's own thread starts parts anyway.
            self._is_wake_pending = True
            assert self._event_loop is not None
            with suppress(RuntimeError):  # the loop has been closed
                self._event_loop.call_soon_threadsafe(self._start_parts)
        elif self._event_loop is None:  # this is the scheduler's thread: no other thread adds the first work
            self._ensure_worker()

    # The scheduler's thread.

    def _ensure_worker(self) -> None:
        if self._loop_thread is not None and (not self._lacks_worker or self._loop_thread.is_alive()):
            return
        self._lacks_worker = False  # cleared before the thread begins, which sets the flag if it gets no event loop
        try:
            self._loop_thread = start_thread(self._run_loop, f"tiered-kv-{self.name}-loop")
        except ResourceError as error:
            self._lacks_worker = True
            self._note_error("thread start", error)

    def _stop_workers(self, deadline: float) -> int:
        if self._loop_thread is None:
            return 0
        while self._event_loop is None and self._loop_thread.is_alive() and time.monotonic() < deadline:  # it starts
            time.sleep(0.001)
        if self._event_loop is not None and self._loop_thread.is_alive():
            with suppress(RuntimeError):  # the loop has been closed
                self._event_loop.call_soon_threadsafe(self._loop_stop.set)
        self._loop_thread.join(max(0.0, deadline - time.monotonic()))
        return int(self._loop_thread.is_alive())

    # The loop's thread.

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_EventLoop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._note_error("the event loop", error)
            self._lacks_worker = self._event_loop is None  # such as for want of descriptors

    async def _serve(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._start_parts()
        await self._loop_stop.wait()
        if self._part_tasks:
            await asyncio.wait(self._part_tasks, timeout=self._shutdown_timeout_s / 2)
        while self._part_tasks:
            for task in self._part_tasks:
                task.cancel()
            await asyncio.wait(self._part_tasks, timeout=self._shutdown_timeout_s / 2)
        if self._client_is_open:
            try:
                await self.close()
            except BaseException as error:
                self._note_error("close", error)

    def _start_parts(self) -> None:
        self._is_wake_pending = False  # first, so that work that is added from now on wakes the loop again
        while True:
            give_way()
            if self._part_queue.take_lookups():
                self._start(self._run_probes())
                continue
            has_room = self._blocks_in_flight + self._part_blocks <= self._blocks_in_flight_max
            part = self._part_queue.take() if has_room else None
            if part is None:
                return
            self._blocks_in_flight += part.stop - part.start
            self._start(self._run_part(part))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._part_tasks.add(task)  # the loop keeps only weak references
        task.add_done_callback(self._part_tasks.discard)

    async def _run_part(self, part: Part) -> None:
        refused = self._begin_part(part)
        outcome = await self._transfer(part) if refused is None else refused
        self._blocks_in_flight -= part.stop - part.start
        self._end_part(part, outcome)
        self._start_parts()

    async def _transfer(self, part: Part) -> Outcome:
        deadline = part.job.deadline
        transfer = self.load_blocks if part.job.metadata.is_promotion else self.store_blocks
        timeout = asyncio.timeout_at(None if deadline == math.inf else deadline)
        try:
            async with timeout:
                await self._ensure_open()
                return checked_outcome(await transfer(part.keys, self._blocks_of(part)), part.keys)
        except BaseException as error:
            reason = Reason.EXPIRED if timeout.expired() else self._reason_of(transfer.__name__, error)
            return Outcome((), reason)

    async def _run_probes(self) -> None:
        while (probe := self._take_probe()) is not None:
            answers = [False] * len(probe.keys)
            timeout = asyncio.timeout_at(probe.deadline)
            try:
                async with timeout:
                    await self._ensure_open()
                    answers = checked_presence(await self.contains_blocks(probe.keys), probe.keys)
            except BaseException as error:
                if not timeout.expired():
                    self._reason_of("contains_blocks", error)
            self._batched_lookups.answer(probe, answers)

    async def _ensure_open(self) -> None:
        if not self._client_is_open:
            async with self._client_opening:
                if not self._client_is_open:
                    await self.open()
                    self._client_is_open = True

    def _reason_of(self, operation: str, error: BaseException) -> Reason:
        """Return the reason that counts `error`. Apart from deadlines, only `shutdown` cancels a coroutine."""
        if isinstance(error, asyncio.CancelledError) and self._is_shut_down:
            return Reason.SHUTDOWN
        return self._note_error(operation, error)
