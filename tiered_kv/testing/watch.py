"""Checks which job uses which row of the primary region, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import xxhash

from tiered_kv.testing.faults import JobWrapperTier
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager


class RowLedger:
    """The rows that jobs in flight read and write, over all tiers of one stack.

    It collects violations and raises nothing: the manager treats a tier's exception as the tier's failure.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []
        """Sentences; a test asserts that there are none."""
        self.read: Counter[int] = Counter()  # how many stores in flight read each row
        self.written: set[int] = set()  # rows that loads in flight write

    def begin(self, job: JobMetadata) -> None:
        """Add a job's rows, and note conflicts with other jobs in flight."""
        rows = set(job.block_ids.tolist())
        if len(rows) != len(job.keys):
            self.violations.append(f"job {job.job_id} has {len(job.keys)} keys and {len(rows)} different rows")
        if clash := rows & self.written:
            self.violations.append(f"job {job.job_id} uses rows {sorted(clash)}, which a load is writing")
        if job.is_promotion:
            if clash := rows & set(+self.read):
                self.violations.append(f"load {job.job_id} writes rows {sorted(clash)}, which a store is reading")
            self.written |= rows
        else:
            self.read.update(rows)

    def end(self, job: JobMetadata) -> None:
        rows = set(job.block_ids.tolist())
        if job.is_promotion:
            self.written -= rows
        else:
            self.read.subtract(rows)


class WatchedTier(JobWrapperTier):
    """Notes violations of the manager in the ledger, which all tiers of the stack share.

    Two jobs must not use one row if one of them writes. The source of a store must not change from submission to
    report, even if the job has expired meanwhile. The wrapped tier must return at once.
    """

    def __init__(self, inner: SecondaryTierManager, ledger: RowLedger) -> None:
        super().__init__(inner)
        shape = inner._primary_kv_view.shape
        assert shape is not None
        self._block_bytes = shape[1]
        self._region = inner._primary_kv_view.cast("B")
        self._ledger = ledger
        self._jobs: dict[JobId, tuple[JobMetadata, list[int]]] = {}
        self.store_blocks_peak = self.load_blocks_peak = 0  # the most blocks in flight at one time

    def submit(self, job: JobMetadata) -> None:
        self._ledger.begin(job)
        self._jobs[job.job_id] = (job, [] if job.is_promotion else self._digests(job))
        blocks = {True: 0, False: 0}
        for each, _ in self._jobs.values():
            blocks[each.is_promotion] += len(each.keys)
        self.load_blocks_peak = max(self.load_blocks_peak, blocks[True])
        self.store_blocks_peak = max(self.store_blocks_peak, blocks[False])
        try:
            super().submit(job)
        except Exception:  # the tier did not take the job
            self._end(*self._jobs.pop(job.job_id))
            raise

    def get_finished(self) -> Iterable[JobResult]:
        results = list(super().get_finished())
        for result in results:
            if result.job_id in self._jobs:
                self._end(*self._jobs.pop(result.job_id))
        return results

    def _end(self, job: JobMetadata, digests: list[int]) -> None:
        self._ledger.end(job)
        if not job.is_promotion and self._digests(job) != digests:
            self._ledger.violations.append(f"the source of store {job.job_id} changed while it was in flight")

    def _digests(self, job: JobMetadata) -> list[int]:
        size = self._block_bytes
        return [xxhash.xxh3_64_intdigest(self._region[row * size : (row + 1) * size]) for row in job.block_ids.tolist()]
