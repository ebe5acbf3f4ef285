"""The scheduler's side of a tier with workers: it queues jobs and lookups, and takes their results.

A `GuardedTier` calls the public methods, on the scheduler's thread; none of them waits. `BlockingTier` and `AsyncTier`
run the parts on their workers. These things stay true:

- Each job is reported once, after its last part has ended. From then on nothing touches its rows.
- A job that names rows outside of the memory moves nothing.
- After its deadline, no further part of a job begins.
"""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Final

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.secrets import scrub
from tiered_kv.errors import TierError
from tiered_kv.hints import DEFAULT_TENANT
from tiered_kv.reasons import Reason
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.lookups import BatchedLookups, Probe
from tiered_kv.toolkit.concurrency import StoreConcurrency
from tiered_kv.toolkit.failure_texts import OF_LOOKUPS, FailureTexts
from tiered_kv.toolkit.jobs import ALL_DONE, Job, Outcome, Part, PartQueue, failure_reason
from tiered_kv.toolkit.record import record_bytes_max

_log = logging.getLogger("tiered_kv.toolkit")

_ROWS_LOGGED: Final = 16
# Of the job or the lookups that this thread or task serves: see the properties of `QueuedTier`.
PART_DEADLINE: ContextVar[float] = ContextVar("tiered_kv_part_deadline", default=math.inf)
PROBE_REQ_IDS: ContextVar[Sequence[str]] = ContextVar("tiered_kv_probe_req_ids", default=())
PART_EPOCH: ContextVar[int] = ContextVar("tiered_kv_part_epoch")
PART_TENANT: ContextVar[str] = ContextVar("tiered_kv_part_tenant", default=DEFAULT_TENANT)


def block_bytes_of(primary_kv_view: memoryview) -> int:
    """Return the bytes of a block of the primary tier.

    Raises `ValueError`: the view is not writable, not C-contiguous, or not of shape (num_blocks, block_bytes).
    """
    shape = primary_kv_view.shape
    if shape is None or len(shape) != 2 or primary_kv_view.readonly or not primary_kv_view.c_contiguous:
        raise ValueError("primary_kv_view must be a writable, C-contiguous view of shape (num_blocks, block_bytes)")
    return shape[1]


class QueuedTier(SecondaryTierManager):
    """The shared part of `BlockingTier` and `AsyncTier`; not for authors to subclass directly.

    The scheduler's thread calls the public methods. Work goes to the workers by `_part_queue` and `_batched_lookups`,
    and results come back by `_job_results`. Workers also read `epoch` and `_is_shut_down`, and set `_lacks_worker`.

    A part of a load has at most `part_blocks` blocks, a part of a store `store_part_blocks`. At most
    `stores_running_max` parts of stores run at once; with `finds_concurrency`, only as many as the storage needs.
    Deadlines of jobs are times of `clock`.
    """

    is_nonblocking: ClassVar[bool] = True
    takes_offsets = True

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        part_blocks: int,
        stores_running_max: int,
        lookup_timeout_s: float,
        shutdown_timeout_s: float,
        finds_concurrency: bool = False,
        store_part_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.block_bytes = block_bytes_of(primary_kv_view)
        self.name = self.tier_spec.name
        self.epoch = 0
        memory = self.tier_spec.memory
        self._row_bytes = self.block_bytes if memory is None else 1  # in `memory`, block ids are offsets in bytes
        self._primary_flat = (primary_kv_view if memory is None else memory).cast("B")
        self._primary_flat_readonly = self._primary_flat.toreadonly()  # for stores
        self._moved_bytes = self.block_bytes
        if self.tier_spec.holds_records:
            self._moved_bytes = record_bytes_max(self.block_bytes)
        self._last_row = (len(self._primary_flat) - self._moved_bytes) // self._row_bytes  # the greatest block id
        self._clock = clock
        self._part_blocks = part_blocks
        self._store_part_blocks = store_part_blocks or part_blocks
        self._shutdown_timeout_s = shutdown_timeout_s
        concurrency = StoreConcurrency(
            stores_running_max, clock, begins_at=1 if finds_concurrency else stores_running_max
        )
        self._part_queue = PartQueue(self._wake, concurrency)
        self._on_finished = self.tier_spec.on_finished
        self._batched_lookups = BatchedLookups(
            self._put_probe, timeout_s=lookup_timeout_s, clock=clock, on_answered=self._on_finished
        )
        self._jobs_in_flight: dict[int, Job] = {}  # submitted and not yet reported
        self._next_deadline = math.inf  # no job in flight has an earlier one
        self._job_results: deque[JobResult] = deque()  # workers append
        self._log_limit = LogLimit()
        self._failure_texts = FailureTexts()
        self._is_shut_down = False
        self._lacks_worker = False  # a start failed: the next step, or another worker, tries again

    @abstractmethod
    def _wake(self) -> None:
        """Let a worker look into the queue. Must not wait, nor raise: the work is queued already. Any thread."""

    def _ensure_worker(self) -> None:
        """Start a worker if there is none. Must not wait, nor raise. The scheduler's thread."""

    @abstractmethod
    def _stop_workers(self, deadline: float) -> int:
        """End the workers and call the author's `close`; return how many workers still run at the deadline."""

    # The scheduler's thread.

    def submit_store(self, job_metadata: JobMetadata) -> None:
        is_load = job_metadata.is_promotion
        part_blocks = self._part_blocks if is_load else self._store_part_blocks
        job = Job(job_metadata, self.epoch, part_blocks, self._clock())
        self._jobs_in_flight[job_metadata.job_id] = job
        if self._is_shut_down or not job.keys:
            job.end_block = 0
            job.drop_reason = Reason.SHUTDOWN if job.keys else None
            self._report([job])
            return
        self._next_deadline = min(self._next_deadline, job.deadline)
        self._part_queue.put(job)

    submit_load = submit_store

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self._batched_lookups.lookup_many((key,), req_context)[0]

    @property
    def lookup_failures(self) -> int:
        return self._batched_lookups.timeouts

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if type(self).lookup is not QueuedTier.lookup:  # the author's own `lookup` answers from memory
            return super().lookup_many(keys, req_context)
        return self._batched_lookups.lookup_many(keys, req_context)

    def get_finished(self) -> Iterable[JobResult]:
        if self._lacks_worker:
            self._ensure_worker()
        if self._next_deadline <= (now := self._clock()):
            self._expire(now)
        if self._batched_lookups.next_deadline <= now:
            self._batched_lookups.expire()
        if not self._job_results:
            return ()
        finished = []
        while self._job_results:
            result = self._job_results.popleft()
            job = self._jobs_in_flight.pop(result.job_id)
            if not result.success and job.metadata.is_promotion:
                loaded = frozenset(result.successful_keys or ())
                for key in job.keys:
                    if key not in loaded:
                        self._batched_lookups.correct(key, job.metadata.req_context.req_id)
            finished.append(result)
        return finished

    def explain_failure(self, reason: str) -> str | None:
        return self._failure_texts.of(reason)

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._batched_lookups.answers:
            self._batched_lookups.forget_request(req_context.req_id)

    def stats(self) -> Mapping[str, Any]:
        return {"refused_lookups_total": self._batched_lookups.refused}

    def begin_epoch(self, epoch: int | None = None) -> None:
        """Invalidate all submitted jobs. Call it from `reset_cache`, on the scheduler's thread.

        Jobs of an earlier epoch that have not started will not run. Running ones are reported as failed. A running
        store must not publish its blocks: compare `part_epoch` with `epoch` under a lock that `reset_cache` takes too.

        The new `epoch` was never used before; by default it is the old one plus 1.
        """
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self._batched_lookups.clear()

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        deadline = time.monotonic() + self._shutdown_timeout_s
        self._report(self._part_queue.drop_all(Reason.SHUTDOWN))
        left = self._stop_workers(deadline)
        if left:
            _log.warning("tier '%s': %d worker(s) did not end; they are left behind", self.name, left)
        self._primary_flat_readonly.release()
        self._primary_flat.release()

    def _expire(self, now: float) -> None:
        """Of jobs past their deadline, cancel the parts that have not started."""
        next_deadline = math.inf
        for job in self._jobs_in_flight.values():
            if job.deadline > now:
                if job.deadline < next_deadline:  # takes a third of the time of `min`
                    next_deadline = job.deadline
            elif self._part_queue.drop_rest(job, Reason.EXPIRED):
                self._report([job])
        self._next_deadline = next_deadline

    def _put_probe(self) -> None:
        if not self._is_shut_down:
            self._part_queue.put_lookups()

    # The workers.

    @property
    def part_deadline(self) -> float:
        """The deadline of the job or lookups that this thread or task serves, in seconds of the clock."""
        return PART_DEADLINE.get()

    @property
    def probe_req_ids(self) -> Sequence[str]:
        """For each key that this thread or task looks up, the id of the request that asked for it first.

        The keys of one request and KV cache group are in the order of the request's prefix, with rare exceptions.
        """
        return PROBE_REQ_IDS.get()

    @property
    def part_epoch(self) -> int:
        """The epoch in which the job was submitted that this thread or task serves; see `begin_epoch`."""
        return PART_EPOCH.get()

    @property
    def part_tenant(self) -> str:
        """The tenant of the job that this thread or task serves: for whose share its blocks count."""
        return PART_TENANT.get()

    def _begin_part(self, part: Part) -> Outcome | None:
        """Return None if the part may run, else its outcome."""
        job = part.job
        if job.deadline <= self._clock():
            return Outcome((), Reason.EXPIRED)
        if job.epoch != self.epoch:
            return Outcome((), Reason.RESET)
        if job.has_rows is None:
            job.has_rows = self._has_rows(job)
        if not job.has_rows:
            return Outcome((), Reason.NO_ROW)  # the engine's fault
        PART_EPOCH.set(job.epoch)
        PART_DEADLINE.set(job.deadline)
        PART_TENANT.set(job.tenant)
        return None

    def _end_part(self, part: Part, outcome: Outcome) -> None:
        """Note how a part ended, and report its job if it was the last. Nothing may touch its blocks from now on."""
        if part.job.epoch != self.epoch:
            outcome = Outcome((), outcome.reason or Reason.RESET)
        if outcome is not ALL_DONE:
            part.job.failed_parts.append((part, outcome))
        if self._part_queue.end(part):
            self._report([part.job])

    def _report(self, jobs: Iterable[Job]) -> None:
        """Pass ended jobs to `get_finished`. Any thread."""
        ended_s = self._clock()
        self._job_results.extend(job.result(ended_s) for job in jobs)
        if self._on_finished is not None:
            self._on_finished()

    def _take_probe(self) -> Probe | None:
        """Return the next lookups, which this thread or task serves from now on."""
        probe = self._batched_lookups.take()
        if probe is not None:
            PART_DEADLINE.set(probe.deadline)
            PROBE_REQ_IDS.set([question.req_context.req_id for question in probe.questions])
        return probe

    def _has_rows(self, job: Job) -> bool:
        """Return whether each block of a job has a row in the memory; in a load, a row of its own. Workers call it."""
        block_ids = np.asarray(job.metadata.block_ids)
        rows: list[int] = block_ids.tolist()
        is_list = block_ids.shape == (len(job.keys),) and block_ids.dtype.kind in "iu"
        is_inside = is_list and 0 <= min(rows) <= max(rows) <= self._last_row
        if is_inside and (not job.metadata.is_promotion or len(set(rows)) == len(rows)):
            return True
        if self._log_limit.take(Reason.NO_ROW) is not None:
            _log.error(
                "tier '%s': refused a job of %d blocks; it needs as many rows from 0 to %d, in a load different ones, "
                "and names %s%s. Nothing was moved; further jobs are only counted",
                self.name,
                len(job.keys),
                self._last_row,
                rows[:_ROWS_LOGGED],
                " ..." if len(rows) > _ROWS_LOGGED else "",
            )
        return False

    def _blocks_of(self, part: Part) -> list[memoryview]:
        metadata, size, step = part.job.metadata, self._moved_bytes, self._row_bytes
        flat = self._primary_flat if metadata.is_promotion else self._primary_flat_readonly
        rows = metadata.block_ids[part.start : part.stop].tolist()
        return [flat[row * step : row * step + size] for row in rows]

    def _note_error(self, operation: str, error: BaseException) -> Reason:
        """Return the reason that counts `error`, and log the error, at a bounded rate for each kind.

        The log has the text of a `TierError` only: a client library may put a password into the text of its errors.
        """
        reason = failure_reason(error)
        kind = f"{operation} raised {type(error).__name__}"
        if isinstance(error, OSError) and type(error).__module__ == "builtins" and error.errno:
            kind += f" ({os.strerror(error.errno)})"
        text = scrub(error.message, set()) if isinstance(error, TierError) else kind
        self._failure_texts.note(OF_LOOKUPS if operation == "contains_blocks" else reason, text)
        if self._log_limit.take(kind) is not None:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{kind} at {frame.filename}:{frame.lineno}"
            if isinstance(error, TierError):
                what = text
            elif type(error) is TimeoutError:  # the place where a deadline passed tells an operator nothing
                what = f"{operation} did not end before its deadline, counted as '{reason}'"
            _log.warning("tier '%s': %s; %s", self.name, what, self._log_limit.about)
        return reason
