"""Jobs of a tier: the queue that divides them into parts for the workers, and the workers' reports.

`QueuedTier` puts jobs from the scheduler's thread. The tier's workers (`BlockingTier`, `AsyncTier`) take parts and end
them, each on a thread of its own. These things stay true:

- A load goes before a store, but neither kind starves the other: see `LOADS_A_STORE`. Jobs of one kind are taken in the
  order of their submission.
- Each block of a job is in one part at most, and the last part's end is seen by one caller only.
- `put` takes no lock. The lock guards a few assignments, never I/O.
"""

from __future__ import annotations

import errno
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.errors import FormatError, TierBusyError, TierError, TierUnavailableError
from tiered_kv.reasons import Reason
from tiered_kv.tiering.base import JobMetadata, JobResult
from tiered_kv.toolkit.concurrency import StoreConcurrency

_REASONS: tuple[tuple[type[TierError], Reason], ...] = (
    (TierBusyError, Reason.BUSY),
    (FormatError, Reason.FORMAT),
    (TierUnavailableError, Reason.UNAVAILABLE),
)
TOGETHER_MAX = 4
"""Jobs that one worker runs together: fewer than the failures that open a breaker, since one error fails all jobs."""
PATIENCE_S = 0.2
"""How long loads go first. If after that still as many wait as workers take, stores have a share until none waits."""
LOADS_A_STORE = 4
"""The share: so many blocks of loads begin for each block of a store."""
_TOGETHER_S = 1.0  # between the deadlines of jobs that run together, at most: the earliest deadline holds for all


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome that `store_blocks` and `load_blocks` of a tier return.

    Args:
        successful_keys: The keys that succeeded; None if all did.
        reason: Why a key failed: a `Reason`, or one word of your own for the counters. Of several reasons, the last.
    """

    successful_keys: Collection[OffloadKey] | None = None
    reason: str | None = None


ALL_DONE = Outcome()


class Job:
    """A job in a `PartQueue`.

    The queue reads and writes the cursors under its lock. Workers append to `failed_parts` until the last part ends.
    """

    def __init__(self, metadata: JobMetadata, epoch: int, part_blocks: int, submitted_s: float) -> None:
        keys = metadata.keys
        self.metadata = metadata
        self.keys: Sequence[OffloadKey] = keys if isinstance(keys, Sequence) else tuple(keys)
        self.deadline = math.inf if metadata.deadline is None else metadata.deadline  # seconds of the tier's clock
        self.submitted_s = submitted_s  # by the tier's clock
        self.tenant = metadata.tenant
        self.epoch = epoch  # the tier's, when the job was submitted
        self.part_blocks = part_blocks  # blocks of one part, at most
        # Cursors.
        self.next_block = 0  # blocks before it have been started
        self.end_block = len(self.keys)  # blocks from here on will not be started
        self.ended_blocks = 0  # blocks of the parts that have ended
        self.drop_reason: Reason | None = None  # why blocks from `end_block` on are not started
        self.failed_parts: list[tuple[Part, Outcome]] = []
        self.has_rows: bool | None = None  # whether all its rows are in the memory; None until a worker has checked

    def result(self, ended_s: float | None = None) -> JobResult:
        """Return the result; call it after the last part has ended."""
        if not self.failed_parts and self.end_block == len(self.keys):
            return JobResult(self.metadata.job_id, True, ended_s=ended_s)
        successful: list[OffloadKey] = []
        reason: str | None = self.drop_reason
        position = 0
        for part, outcome in sorted(self.failed_parts, key=lambda failed: failed[0].start):
            successful += self.keys[position : part.start]
            successful += outcome.successful_keys or ()
            position = part.stop
            reason = reason or outcome.reason
        successful += self.keys[position : self.end_block]
        return JobResult(self.metadata.job_id, False, successful, reason or "", ended_s)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Blocks `start` to `stop` (exclusive) of a job, for one worker."""

    job: Job
    start: int
    stop: int
    is_extra: bool = False  # whether it runs in one call with another part, and only the other counts as running

    @property
    def keys(self) -> Sequence[OffloadKey]:
        return self.job.keys[self.start : self.stop]


def checked_outcome(returned: object, keys: Sequence[OffloadKey]) -> Outcome:
    """Return the outcome of `store_blocks` or `load_blocks`, without keys that were not requested."""
    if not isinstance(returned, Outcome):
        return Outcome((), Reason.BAD_OUTCOME)
    if returned.successful_keys is None:
        return ALL_DONE
    if isinstance(returned.successful_keys, Mapping):  # perhaps from keys to their success
        return Outcome((), Reason.BAD_OUTCOME)
    claimed = frozenset(returned.successful_keys)
    successful = [key for key in keys if key in claimed]
    return ALL_DONE if len(successful) == len(keys) else Outcome(successful, returned.reason or Reason.ERROR)


def checked_presence(returned: object, keys: Sequence[OffloadKey]) -> list[bool]:
    """Return the answers of `contains_blocks`; all False if they are invalid."""
    if not isinstance(returned, Sequence | np.ndarray) or isinstance(returned, str) or len(returned) != len(keys):
        return [False] * len(keys)
    # A text would count as true, even "no".
    return [isinstance(answer, (int, np.generic)) and bool(answer) for answer in returned]


def failure_reason(error: BaseException) -> Reason:
    """Return the reason that `error` stands for."""
    if isinstance(error, TierError):
        return next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.ERROR)
    if isinstance(error, TimeoutError):
        return Reason.TIMEOUT
    if isinstance(error, OSError):
        return Reason.NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else Reason.IO_ERROR
    return Reason.ERROR


class PartQueue:
    """Two queues of jobs, each first in, first out. Loads go before stores, and lookups before both.

    Loads that never end would starve stores. So once loads have always waited for `PATIENCE_S`, a part of a store
    begins whenever `LOADS_A_STORE` times as many blocks of loads have begun since the last one.

    Workers take jobs in parts, so that all of them serve one large job. The scheduler adds jobs without the lock: a
    worker that holds the lock, and has lost the interpreter, cannot delay the scheduler. The lock is held for a few
    assignments.

    The queue calls `wake`, on any thread, if one more worker may find a part. `wake` must not wait. `concurrency`
    limits the parts of stores that run at once, so that slow stores leave a worker to loads: to its `limit`, and to its
    `limit_max` beside loads that never end.
    """

    def __init__(self, wake: Callable[[], None], concurrency: StoreConcurrency) -> None:
        self._wake = wake
        self._concurrency = concurrency
        self._stores_running = 0  # under the lock
        self._passed_blocks = 0  # blocks of loads that began since a part of a store did
        self._loads_since_s = math.inf  # since when loads have always waited
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._has_lookups = False
        self._lock = threading.Lock()  # guards removals from the queues, jobs' cursors, `_concurrency`

    # The scheduler's thread.

    def put(self, job: Job) -> None:
        """Add a job that has at least one block."""
        self._queue_of(job).append(job)
        # Without the lock: the job is queued. At the limit, the worker that ends the next part wakes a worker for it.
        if job.metadata.is_promotion or self._stores_running < self._concurrency.limit or self._concurrency.has_stalled:
            self._wake()

    def put_lookups(self) -> None:
        self._has_lookups = True
        self._wake()

    # Any thread.

    def take_lookups(self) -> bool:
        """Return whether there are lookups to take. Mostly only one caller gets True."""
        if not self._has_lookups:
            return False
        self._has_lookups = False  # before they are taken: later lookups set it again
        return True

    def take(self) -> Part | None:
        """Return the next part, or None. Call `end` for each part."""
        with self._lock:
            queue = self._queue_in_turn()
            if not queue:
                return None
            job = queue[0]
            start = job.next_block
            job.next_block = stop = min(start + job.part_blocks, job.end_block)
            if stop == job.end_block:
                queue.popleft()
            if queue is self._stores:
                self._stores_running += 1
                self._passed_blocks = 0
            else:
                self._passed_blocks += stop - start
            may_store = self._stores_running < self._concurrency.limit or self._concurrency.has_stalled
            has_more = bool(self._loads or (self._stores and may_store))
        if has_more:
            self._wake()
        return Part(job, start, stop)

    def take_small_jobs(self, part: Part) -> list[Part]:
        """Return whole small jobs to run together with `part`: one call costs less than a call for each job.

        Together they have at most the blocks of one part, and each key once. One job for each other worker stays in
        the queue. Call `end` for each, and for `part` last.
        """
        first = part.job
        queue, room = self._queue_of(first), first.part_blocks - (part.stop - part.start)
        if room <= 0 or len(queue) <= self._concurrency.limit_max:
            return []
        taken: list[Part] = []
        keys = set(part.keys)
        with self._lock:
            while len(queue) > self._concurrency.limit_max and len(taken) < TOGETHER_MAX - 1:
                job = queue[0]
                room -= job.end_block
                is_alike = job.epoch == first.epoch and job.deadline <= first.deadline + _TOGETHER_S
                is_alike = is_alike and job.tenant == first.tenant
                if job.next_block or room < 0 or not is_alike or not keys.isdisjoint(job.keys):
                    break
                keys.update(job.keys)
                queue.popleft()
                job.next_block = job.end_block
                if job.metadata.is_promotion:
                    self._passed_blocks += job.end_block
                taken.append(Part(job, 0, job.end_block, is_extra=True))
        return taken

    def end(self, part: Part) -> bool:
        """Note that a part has ended; return whether it was the last of its job."""
        job = part.job
        with self._lock:
            job.ended_blocks += part.stop - part.start
            is_last = job.ended_blocks == job.end_block
            unblocks_stores = False
            if not job.metadata.is_promotion and not part.is_extra:
                unblocks_stores = self._stores_running >= self._concurrency.limit
                self._stores_running -= 1
        if unblocks_stores:
            self._wake()
        return is_last

    def begin_stores(self) -> None:
        """Note that a worker begins to move the blocks of a store. Its wait for the engine's thread is over."""
        with self._lock:
            self._concurrency.begin()

    def end_stores(self, blocks: int) -> None:
        """Note that a worker has moved `blocks` blocks since `begin_stores`."""
        with self._lock:
            has_risen = self._concurrency.end(blocks, is_behind=bool(self._stores))
        if has_risen:
            self._wake()

    @property
    def stores_waiting(self) -> int:
        return len(self._stores)

    def drop_rest(self, job: Job, reason: Reason) -> bool:
        """Cancel the blocks of `job` that have not been started; return whether the caller has to report the job.

        If not, the job has ended, or the worker that ends its last part reports it.
        """
        with self._lock:
            if job.next_block == job.end_block:
                return False
            self._queue_of(job).remove(job)
            job.end_block = job.next_block
            job.drop_reason = reason
            return job.ended_blocks == job.end_block

    def drop_all(self, reason: Reason) -> list[Job]:
        """Cancel all blocks that have not been started; return the jobs that the caller has to report."""
        with self._lock:
            queued = [*self._loads, *self._stores]
        return [job for job in queued if self.drop_rest(job, reason)]

    def _queue_in_turn(self) -> deque[Job] | None:
        """Return the queue whose first job is next; None, or an empty one, if none may begin. Under the lock."""
        concurrency = self._concurrency
        now_s = concurrency.clock()
        if not self._loads:
            self._loads_since_s = math.inf
        elif self._loads_since_s == math.inf:
            self._loads_since_s = now_s
        if not self._stores:
            return self._loads
        concurrency.rise_if_stalled()
        first = self._stores[0]
        is_due = self._passed_blocks >= LOADS_A_STORE * min(first.part_blocks, first.end_block - first.next_block)
        if self._loads:
            is_turn = is_due and now_s - self._loads_since_s >= PATIENCE_S
            # One part beside many loads gets less of the storage than the share of stores: more than `limit` may run.
            return self._stores if is_turn and self._stores_running < concurrency.limit_max else self._loads
        return self._stores if self._stores_running < concurrency.limit else None

    def _queue_of(self, job: Job) -> deque[Job]:
        return self._loads if job.metadata.is_promotion else self._stores
