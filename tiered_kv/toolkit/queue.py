"""The queue between a scheduler that must never wait and the workers that do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tiered_kv.toolkit.jobs import Job, Part


class PartQueue:
    """Two queues of jobs, taken in parts: loads before stores, each first in, first out. Lookups go before both; the
    queue only notes that there are some.

    A job is added in one step, whatever its size. The workers take parts of it, so all of them serve one large
    job. The scheduler appends without taking the lock: a worker that loses the
    interpreter lock while it holds this lock cannot delay it. The lock is held for a few assignments, never during
    a transfer.

    Args:
        wake: Called, by any thread, when one more worker may find a part. Must not wait.
        stores_running_max: Store parts that may run at once, so that slow stores leave a worker to others.
    """

    def __init__(self, wake: Callable[[], None], *, stores_running_max: int) -> None:
        self._wake = wake
        self._stores_running_max = stores_running_max
        self._stores_running = 0  # under the lock
        self._loads: deque[Job] = deque()  # appended to by the scheduler, like the next
        self._stores: deque[Job] = deque()
        self._has_lookups = False
        self._lock = threading.Lock()  # guards removals from the queues, and the cursors of jobs

    def put(self, job: Job) -> None:
        """Add a job that has at least one block; scheduler thread."""
        self._queue_of(job).append(job)
        self._wake()

    def put_lookups(self) -> None:
        """Let a worker take the collected lookups; scheduler thread."""
        self._has_lookups = True
        self._wake()

    def take_lookups(self) -> bool:
        """Return whether there are lookups; one caller gets True, seldom two. Any thread."""
        if not self._has_lookups:
            return False
        self._has_lookups = False  # before they are taken: lookups that are put from now on set it again
        return True

    def take(self) -> Part | None:
        """Return the next part, or None; any thread. Pair each part with `end`."""
        with self._lock:
            queue = self._loads or self._stores
            if not queue:
                return None
            job = queue[0]
            if queue is self._stores:
                if self._stores_running >= self._stores_running_max:
                    return None
                self._stores_running += 1
            start = job.next_block
            job.next_block = stop = min(start + job.part_blocks, job.end_block)
            if stop == job.end_block:
                queue.popleft()
            has_more = bool(self._loads or self._stores)
        if has_more:
            self._wake()
        return Part(job, start, stop)

    def end(self, part: Part) -> bool:
        """Note that a part has ended; return whether it was its job's last, True once for each job."""
        job = part.job
        with self._lock:
            job.ended_blocks += part.stop - part.start
            is_last = job.ended_blocks == job.end_block
            unblocks_stores = False
            if not job.metadata.is_promotion:
                unblocks_stores = self._stores_running == self._stores_running_max
                self._stores_running -= 1
        if unblocks_stores:
            self._wake()
        return is_last

    def drop_rest(self, job: Job, reason: str) -> bool:
        """Take back the blocks of `job` that have not been started; any thread.

        Returns:
            True if nothing of the job is running, so that the caller has to report it. If False, it has ended
            already or the worker that ends its last part reports it.
        """
        with self._lock:
            if job.next_block == job.end_block:
                return False
            self._queue_of(job).remove(job)
            job.end_block = job.next_block
            job.drop_reason = reason
            return job.ended_blocks == job.end_block

    def drop_all(self, reason: str) -> list[Job]:
        """Take back everything that has not been started; return the jobs that the caller has to report."""
        with self._lock:
            queued = [*self._loads, *self._stores]
        return [job for job in queued if self.drop_rest(job, reason)]

    def _queue_of(self, job: Job) -> deque[Job]:
        return self._loads if job.metadata.is_promotion else self._stores
