"""Where a copy goes: a tier that is opened as a stack opens it, and gets records in place of blocks.

A `Copier` calls it, on its thread, which plays the scheduler's part. The tier's own workers store the records. So the
tier keeps to its capacity, its budget for a shared directory and its durations, and evicts as always. These things stay
true:

- A row belongs to one job until the tier has reported the job.
- No call waits longer than a job's deadline.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import TierUnavailableError
from tiered_kv.tiering.base import JobMetadata, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.record import HEADER_BYTES, record_bytes_max

JOB_BYTES: Final = 16 << 20  # of one job, about
_JOBS: Final = 5  # jobs for which there are rows: one is read, the others are stored
JOB_BLOCKS_MAX: Final = 256
_FAILED_JOBS_MAX: Final = 3
"""After so many jobs in a row of which the target took no block, the copy ends: it would try each block in vain."""
_GRACE_S: Final = 5.0  # how much later than a job's deadline the tier may report it
_POLL_S: Final = 0.02
_REQUEST: Final = ReqContext("copy")


class Row(NamedTuple):
    """Memory for one record, of a target."""

    number: int
    memory: memoryview  # of `record_bytes_max` bytes


class Record(NamedTuple):
    """A verified record at the start of a row."""

    key: OffloadKey
    row: Row
    size_bytes: int


class RecordTarget(Protocol):
    """Takes the records of a copy."""

    job_blocks: int
    """Blocks of one call of `store`, at most."""

    def has(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return which blocks are there already."""

    def rows(self, count: int) -> list[Row]:
        """Return free rows, `job_blocks` at most; wait until there are so many. A call of `store` follows."""

    def store(self, records: Sequence[Record]) -> None:
        """Begin to store records, which lie in some of the last `rows`. The other rows are free again."""

    def drain(self) -> None:
        """Wait until all records are stored, or refused."""

    stored: int
    """Records that were stored."""
    stored_bytes: int
    refused: Counter[str]
    """Records that were not stored, by reason."""


class TierTarget:
    """A tier's storage as the target of a copy.

    Raises:
        ConfigError, TierError: The tier cannot be opened; see `SecondaryTierFactory.create`.
    """

    def __init__(
        self, settings: TierSettings, namespace_digest: bytes, namespace: Mapping[str, object], block_bytes: int
    ) -> None:
        self.stored = self.stored_bytes = 0
        self.refused: Counter[str] = Counter()
        self._name = settings.name
        self._row_bytes = record_bytes_max(block_bytes)
        payload_bytes = self._row_bytes - HEADER_BYTES  # begins on a page, so that it needs no copy to be written
        self._step = mmap.PAGESIZE + -(-payload_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.job_blocks = max(1, min(JOB_BLOCKS_MAX, JOB_BYTES // self._row_bytes))
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages by default
        region = mmap.mmap(-1, _JOBS * self.job_blocks * self._step, flags=private)
        with suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)  # a short copy would spend a third of its time on faults of small pages
        self._memory = memoryview(region)
        self._free = list(range(_JOBS * self.job_blocks))
        self._taken: set[int] = set()  # the rows of the last call of `rows`
        self._jobs: dict[int, Sequence[Record]] = {}  # which the tier has not reported
        self._last_deadline = 0.0  # of a job
        self._numbers = itertools.count(1)
        self._failed_jobs = 0
        self._job_timeout_s, self._lookup_timeout_s = settings.job_timeout, settings.lookup_timeout
        self._finished = threading.Event()
        sizes = memoryview(bytearray(block_bytes)).cast("B", (1, block_bytes))
        spec = TierSpec(
            settings.name,
            block_bytes,
            namespace_digest,
            namespace,
            memory=self._memory,
            on_finished=self._finished.set,
            holds_records=True,
        )
        required = settings.model_copy(update={"required": True})
        self._tier = SecondaryTierFactory.create(spec, sizes, required)

    def has(self, keys: Sequence[OffloadKey]) -> list[bool]:
        request = ReqContext(f"copy-{next(self._numbers)}")
        self._tier.on_new_request(request)
        try:
            end_s = time.monotonic() + self._lookup_timeout_s + _GRACE_S
            while None in (answers := self._tier.lookup_many(keys, request)):
                self._tier.on_schedule_end()
                self._wait()
                if time.monotonic() >= end_s:  # then the store finds out
                    break
            return [bool(answer) for answer in answers]
        finally:
            self._tier.on_request_finished(request)

    def rows(self, count: int) -> list[Row]:
        while len(self._free) < count:
            self._wait()
        self._taken = set(self._free[-count:])
        taken = self._free[-count:]
        del self._free[-count:]
        return [Row(row, self._memory[self._offset(row) :][: self._row_bytes]) for row in taken]

    def store(self, records: Sequence[Record]) -> None:
        self._free += self._taken.difference(each.row.number for each in records)
        self._taken = set()
        if records:
            offsets = np.array([self._offset(each.row.number) for each in records], dtype=np.int64)
            deadline = time.monotonic() + self._job_timeout_s
            keys = [each.key for each in records]
            job = JobMetadata(next(self._numbers), keys, offsets, False, _REQUEST, deadline)
            self._jobs[job.job_id] = records
            self._last_deadline = deadline
            self._tier.submit_store(job)
        self._tier.on_schedule_end()
        self._take_results()

    def drain(self) -> None:
        while self._jobs:
            self._wait()

    def close(self) -> None:
        """End the tier, as a stack does. Its storage has what was stored."""
        self._tier.shutdown()

    def _offset(self, row: int) -> int:
        """Return where in the memory a row begins: its header ends on a page."""
        return row * self._step + mmap.PAGESIZE - HEADER_BYTES

    def _wait(self) -> None:
        """Wait a moment for results. Raises `TierUnavailableError` if a job is long overdue."""
        self._finished.wait(_POLL_S)  # a tier that tells nobody of its results is asked now and then
        self._finished.clear()
        self._tier.on_schedule_end()
        self._take_results()
        if self._jobs and time.monotonic() > self._last_deadline + _GRACE_S:
            raise TierUnavailableError("it does not report its stores", tier=self._name, operation="copy")

    def _take_results(self) -> None:
        for result in self._tier.get_finished():
            records = self._jobs.pop(result.job_id)
            done = list(records)
            if not result.success:
                successful = frozenset(result.successful_keys or ())
                done = [each for each in records if each.key in successful]
                self.refused[result.word] += len(records) - len(done)
            self.stored += len(done)
            self.stored_bytes += sum(each.size_bytes for each in done)
            self._free += [each.row.number for each in records]
            self._failed_jobs = 0 if done else self._failed_jobs + 1
            if self._failed_jobs >= _FAILED_JOBS_MAX:
                why = self._tier.explain_failure(result.reason) or result.cause.sentence
                raise TierUnavailableError(f"it takes no blocks: {why}", tier=self._name, operation="copy")
