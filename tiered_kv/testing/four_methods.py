"""The smallest possible tier: the four abstract methods over a dictionary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager


class FourMethodTier(SecondaryTierManager):
    """Keeps copies of blocks in a dictionary, and executes each job within its submission.

    It has no partial success, deadlines, verification or resets, which are optional for a tier.
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        shape = primary_kv_view.shape
        assert shape is not None
        self._block_bytes = shape[1]
        self._region = primary_kv_view.cast("B")
        self._finished: list[JobResult] = []
        self.blocks: dict[OffloadKey, bytes] = {}
        """The stored blocks; tests may read and damage them."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.blocks

    def submit_store(self, job_metadata: JobMetadata) -> None:
        for key, row in self._rows(job_metadata):
            if key not in self.blocks:
                self.blocks[key] = bytes(row)
        self._finished.append(JobResult(job_metadata.job_id, True))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        success = all(key in self.blocks for key in job_metadata.keys)
        if success:
            for key, row in self._rows(job_metadata):
                row[:] = self.blocks[key]
        self._finished.append(JobResult(job_metadata.job_id, success))

    def get_finished(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    def _rows(self, job: JobMetadata) -> Iterable[tuple[OffloadKey, memoryview]]:
        for key, block_id in zip(job.keys, job.block_ids.tolist(), strict=True):
            yield key, self._region[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]
