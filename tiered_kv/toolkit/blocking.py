"""The base of tiers that use blocking calls: files, sockets, any synchronous client.

The scheduler's thread queues jobs and takes results (`queued`). Worker threads call the author's methods, several at a
time. A load goes before a store (`jobs` says how long), and stores give way to the engine's thread. An exception of an
author's method fails its part, and ends no worker.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ResourceError
from tiered_kv.system.step import IDLE_WAIT, IDLE_WAIT_S_MAX, give_way, wait_for_idle
from tiered_kv.system.threads import start_thread
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome, Part, checked_outcome, checked_presence
from tiered_kv.toolkit.queued import PART_DEADLINE, QueuedTier, block_bytes_of

BUSY_WAIT_S_MAX = 0.02
"""How long a part of a store waits until the engine is idle, if the store has been held back long enough."""
_WORK = True
_STOP = False


class BlockingTier(QueuedTier):
    """A tier for an author who writes blocking methods. Worker threads call them, several at a time.

    Jobs are cut into parts, so that all threads serve one large job. If many small jobs wait, one call gets the blocks
    of several. Lookups go before loads and loads before stores, but none starves the others. With several threads,
    stores leave one thread free, and wait while the engine's thread computes. They run on as few threads as the storage
    needs. An exception fails all blocks of the call.

    Parts that have not started by the deadline of their job never start. Nothing can end a running call from outside,
    so give each call to a client or server a timeout. Threads are daemons: one that hangs does not keep the process.

    Args:
        offloading_spec, primary_kv_view, tier_type: As in `SecondaryTierManager`.
        threads: Worker threads, at least 1.
        part_bytes: Limit of one part of a job, in bytes.
        part_blocks_min: The limit of a part is never below this number of blocks.
        store_part_blocks_min: The same for parts of stores, whose limit is never below the limit of loads.
        lookup_timeout_s: After how long a lookup without an answer is a miss.
        shutdown_timeout_s: How long `shutdown` waits for the threads.
        lookup_thread: Whether one more thread serves lookups only, so that no lookup waits for a part to end.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        threads: int = 4,
        part_bytes: int = 4 << 20,
        part_blocks_min: int = 1,
        store_part_blocks_min: int = 1,
        lookup_timeout_s: float = 1.0,
        shutdown_timeout_s: float = 2.0,
        lookup_thread: bool = False,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        part_blocks = max(part_blocks_min, part_bytes // block_bytes_of(primary_kv_view))
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            part_blocks=part_blocks,
            store_part_blocks=max(store_part_blocks_min, part_blocks),
            stores_running_max=max(1, threads - 1),
            lookup_timeout_s=lookup_timeout_s,
            shutdown_timeout_s=shutdown_timeout_s,
            finds_concurrency=True,
        )
        self._threads_max = threads
        self._has_lookup_thread = lookup_thread
        self._engine_pauses = True  # whether the last store that waited for a pause of the engine found one
        self._work_tokens: SimpleQueue[bool] = SimpleQueue()  # one for each part that may be in the queue
        self._lookup_tokens: SimpleQueue[bool] = SimpleQueue()  # for the thread that serves lookups only
        self._threads_lock = threading.Lock()  # guards the three below
        self._worker_threads: list[threading.Thread] = []
        self._threads_running = 0
        self._is_stopping = False

    # The author writes these methods. Worker threads call them.

    @abstractmethod
    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        """Store blocks. A block that is stored already succeeds, and is not written again.

        Args:
            blocks: Read-only views of `block_bytes` each, in the order of `keys`. They must not be kept.
        """

    @abstractmethod
    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        """Load blocks into `blocks`, which are as in `store_blocks` but writable.

        If a block is absent or fails verification, its key is not successful.
        """

    @abstractmethod
    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return for each key whether its block is stored completely."""

    def close(self) -> None:
        """Release files and connections; the last worker thread calls it once, when nothing else runs.

        If no worker thread could be started, `shutdown` calls it.
        """
        return

    # The threads.

    def _wake(self) -> None:
        self._ensure_worker()
        self._work_tokens.put(_WORK)

    def _ensure_worker(self) -> None:
        if not self._worker_threads:
            self._start_thread()

    def _put_probe(self) -> None:
        super()._put_probe()
        if self._has_lookup_thread:
            self._lookup_tokens.put(_WORK)

    def _start_thread(self) -> None:
        """Start one more thread. That thread starts the next one, so the scheduler waits for one start at most."""
        with self._threads_lock:
            number = len(self._worker_threads)
            if number >= self._threads_max + self._has_lookup_thread or self._is_stopping:
                return
            is_for_lookups = number == self._threads_max
            name = f"tiered-kv-{self.name}-{number}"
            try:
                self._worker_threads.append(start_thread(self._serve, name, is_for_lookups))
                self._threads_running += 1
                self._lacks_worker = False
            except ResourceError as error:  # use fewer, and try again later
                self._lacks_worker = True
                self._note_error("thread start", error)

    def _serve(self, is_for_lookups: bool) -> None:
        self._start_thread()
        tokens = self._lookup_tokens if is_for_lookups else self._work_tokens
        while tokens.get() is _WORK:
            try:
                self._serve_one(is_for_lookups)
            except BaseException as error:  # the thread goes on; jobs expire and lookups time out
                self._note_error("a worker", error)
        with self._threads_lock:
            self._threads_running -= 1
            is_last = self._threads_running == 0
        if is_last:
            self._close()

    def _close(self) -> None:
        try:
            self.close()
        except BaseException as error:
            self._note_error("close", error)

    def _serve_one(self, is_for_lookups: bool) -> None:
        if self._lacks_worker:
            self._start_thread()
        give_way()
        if self._part_queue.take_lookups():
            self._run_probes(is_for_lookups)
        elif not is_for_lookups:
            self._run_next_part()

    def _run_next_part(self) -> None:
        part = self._part_queue.take()
        if part is not None and part.job.metadata.is_promotion:
            self._run_parts([part, *self._part_queue.take_small_jobs(part)])
        elif part is not None:
            self._run_stores(part)

    def _run_stores(self, part: Part) -> None:
        """Run a part of a store while the engine's thread does not compute.

        A single thread never waits: it serves loads too. A store is held back until `IDLE_WAIT_S_MAX` after it was
        submitted. A later part waits for `BUSY_WAIT_S_MAX`; if the engine made no pause for the last one, the less, the
        more stores are queued.
        """
        if self._threads_max > 1:
            job, now_s = part.job, self._clock()
            waiting = 0 if self._engine_pauses else self._part_queue.stores_waiting
            wait_s = max(job.submitted_s + IDLE_WAIT_S_MAX - now_s, BUSY_WAIT_S_MAX / (1 + waiting))
            IDLE_WAIT.left_s = min(wait_s, job.deadline - now_s)
        try:
            wait_for_idle()
            self._run_parts([part, *self._part_queue.take_small_jobs(part)])
            self._engine_pauses = IDLE_WAIT.left_s > 0.0
        finally:
            IDLE_WAIT.left_s = 0.0

    def _run_parts(self, parts: Sequence[Part]) -> None:
        """Run parts of one epoch, which have no key in common, in one call of the author's method."""
        outcomes = [self._begin_part(part) for part in parts]
        ready = [part for part, refused in zip(parts, outcomes, strict=True) if refused is None]
        done = ALL_DONE
        if ready:
            PART_DEADLINE.set(min(part.job.deadline for part in ready))
            done = self._transfer(ready)
        # The first part counts as running for all parts of the call, so it ends last.
        for part, refused in reversed(list(zip(parts, outcomes, strict=True))):
            own = done if len(ready) == 1 else checked_outcome(done, part.keys)
            self._end_part(part, own if refused is None else refused)

    def _transfer(self, parts: Sequence[Part]) -> Outcome:
        is_store = not parts[0].job.metadata.is_promotion
        transfer = self.store_blocks if is_store else self.load_blocks
        keys = [key for part in parts for key in part.keys]
        try:
            if is_store:
                self._part_queue.begin_stores()
            return checked_outcome(transfer(keys, [block for part in parts for block in self._blocks_of(part)]), keys)
        except BaseException as error:  # of any kind: the thread continues
            return Outcome((), self._note_error(transfer.__name__, error))
        finally:
            if is_store:
                self._part_queue.end_stores(len(keys))

    def _run_probes(self, is_for_lookups: bool) -> None:
        while (probe := self._take_probe()) is not None:
            try:
                answers = checked_presence(self.contains_blocks(probe.keys), probe.keys)
            except BaseException as error:
                self._note_error("contains_blocks", error)
                answers = [False] * len(probe.keys)
            self._batched_lookups.answer(probe, answers)
            if self._threads_max == 1 and not is_for_lookups:  # lookups that never end would starve jobs
                self._run_next_part()

    def _stop_workers(self, deadline: float) -> int:
        self._ensure_worker()  # a worker has to call `close`
        with self._threads_lock:
            self._is_stopping = True
            threads = list(self._worker_threads)
        if not threads:
            self._close()
        for _ in range(self._threads_max):
            self._work_tokens.put(_STOP)
        self._lookup_tokens.put(_STOP)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)
