"""The toolkit's jobs: queued, divided into parts that run in parallel, and reported when the last part has ended."""

from __future__ import annotations

import errno
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.errors import FormatError, TierBusyError, TierError, TierUnavailableError
from tiered_kv.tiering.base import JobMetadata, JobResult

_REASONS: tuple[tuple[type[TierError], str], ...] = (
    (TierBusyError, "busy"),
    (FormatError, "format"),
    (TierUnavailableError, "unavailable"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a batch of blocks; an author's `store_blocks` and `load_blocks` return it.

    Args:
        successful_keys: The keys that succeeded; None for all of them.
        reason: One word for the counters if some did not, such as "checksum", "absent" or "no_space".
    """

    successful_keys: Collection[OffloadKey] | None = None
    reason: str = ""


ALL_DONE = Outcome()
"""Every block succeeded."""


@dataclass(slots=True, eq=False)
class Job:
    """A job on its way through a `PartQueue`.

    The fields up to `part_blocks` never change. The cursors belong to the queue and are read and written
    under its lock; `failed_parts` is only appended to until the last part has ended.
    """

    metadata: JobMetadata
    keys: Sequence[OffloadKey]
    """The job's, in a sequence."""
    epoch: int
    """The tier's epoch when the job was submitted; see `QueuedTier.begin_epoch`."""
    part_blocks: int
    """Blocks in one part, at most."""
    end_block: int
    """Blocks from here on never run: the number of keys, or of those started when the rest was cancelled."""
    next_block: int = 0
    """Blocks before this one have been started."""
    ended_blocks: int = 0
    drop_reason: str = ""
    failed_parts: list[tuple[Part, Outcome]] = field(default_factory=list)

    @classmethod
    def of(cls, metadata: JobMetadata, epoch: int, part_blocks: int) -> Job:
        """Return the job that `metadata` describes, in the same time for any number of keys in a sequence."""
        keys = metadata.keys if isinstance(metadata.keys, Sequence) else tuple(metadata.keys)
        return cls(metadata, keys, epoch, part_blocks, end_block=len(keys))

    @property
    def deadline(self) -> float:
        """Seconds of the tier's clock; infinite for never."""
        return math.inf if self.metadata.deadline is None else self.metadata.deadline

    def result(self) -> JobResult:
        """Return how the job ended. Call it once its last part has ended."""
        if not self.failed_parts and self.end_block == len(self.keys):
            return JobResult(self.metadata.job_id, True)
        successful: list[OffloadKey] = []
        reason = self.drop_reason
        position = 0
        for part, outcome in sorted(self.failed_parts, key=lambda failed: failed[0].start):
            successful += self.keys[position : part.start]
            successful += outcome.successful_keys or ()
            position = part.stop
            reason = reason or outcome.reason
        successful += self.keys[position : self.end_block]
        return JobResult(self.metadata.job_id, False, successful, reason)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Blocks `start` to `stop` (exclusive) of a job, for one worker."""

    job: Job
    start: int
    stop: int
    is_beside: bool = False
    """Whether its worker took it beside another part, which is the one that counts as running."""

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """Its blocks' keys."""
        return self.job.keys[self.start : self.stop]


def checked_outcome(returned: object, keys: Sequence[OffloadKey]) -> Outcome:
    """Return the result `returned` by an author's method for `keys`, without keys that were not requested."""
    if not isinstance(returned, Outcome):
        return Outcome((), "bad_outcome")
    if returned.successful_keys is None:
        return ALL_DONE
    claimed = frozenset(returned.successful_keys)
    successful = [key for key in keys if key in claimed]
    return ALL_DONE if len(successful) == len(keys) else Outcome(successful, returned.reason or "error")


def checked_answers(returned: object, keys: Sequence[OffloadKey]) -> list[bool]:
    """Return the answers of `contains_blocks` for `keys`; all False if they are invalid."""
    if not isinstance(returned, Sequence | np.ndarray) or len(returned) != len(keys):
        return [False] * len(keys)
    return [bool(answer) for answer in returned]


def failure_reason(error: BaseException) -> str:
    """Return the word for `error` in the counters."""
    if isinstance(error, TierError):
        return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "error")
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, OSError):
        return "no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io_error"
    return "error"


TOGETHER_MAX = 4
"""Jobs that one worker does together: fewer than the failures that open a breaker, since one may fail all of them."""
_TOGETHER_S = 1.0
"""How far the deadlines of such jobs may be apart: the first of them holds for all."""


class PartQueue:
    """Two queues of jobs, taken in parts: loads before stores, each first in, first out. Lookups go before both; the
    queue only notes that there are some.

    A job is added in one step, whatever its size. The workers take parts of it, so all of them serve one large job. The
    scheduler appends without taking the lock: a worker that loses the interpreter lock while it holds this lock cannot
    delay it. The lock is held for a few assignments, never during a transfer.

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

    def take_beside(self, part: Part) -> list[Part]:
        """Return whole jobs that one worker may do together with `part`, with which they make one part at most.

        Small jobs, each alone, would cost a worker more than their blocks do. One job for each other worker stays. No
        two of them have a key in common. Any thread. Pair each with `end`, and `part` last.
        """
        first = part.job
        queue, room = self._queue_of(first), first.part_blocks - (part.stop - part.start)
        if room <= 0 or len(queue) <= self._stores_running_max:
            return []
        taken: list[Part] = []
        keys = set(part.keys)
        with self._lock:
            while len(queue) > self._stores_running_max and len(taken) < TOGETHER_MAX - 1:
                job = queue[0]
                room -= job.end_block
                is_alike = job.epoch == first.epoch and job.deadline <= first.deadline + _TOGETHER_S
                if job.next_block or room < 0 or not is_alike or not keys.isdisjoint(job.keys):
                    break
                keys.update(job.keys)
                queue.popleft()
                job.next_block = job.end_block
                taken.append(Part(job, 0, job.end_block, is_beside=True))
        return taken

    def end(self, part: Part) -> bool:
        """Note that a part has ended; return whether it was its job's last, True once for each job."""
        job = part.job
        with self._lock:
            job.ended_blocks += part.stop - part.start
            is_last = job.ended_blocks == job.end_block
            unblocks_stores = False
            if not job.metadata.is_promotion and not part.is_beside:
                unblocks_stores = self._stores_running == self._stores_running_max
                self._stores_running -= 1
        if unblocks_stores:
            self._wake()
        return is_last

    def drop_rest(self, job: Job, reason: str) -> bool:
        """Take back the blocks of `job` that have not been started; return whether the caller has to report it.

        Otherwise it has ended already, or the worker that ends its last part reports it. Any thread.
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
