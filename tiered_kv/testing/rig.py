"""Drives one tier in a test: with its own region, known bytes in every block, and bounded waits.

The conformance checks and other tests call it, on one thread, which acts as the scheduler's. What must stay true: a row
belongs to one job at a time, and the rig knows the expected bytes of every row.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext, get_offload_block_hash, get_offload_group_idx, make_offload_key
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.hints import DEFAULT_TENANT
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager, TierSpec

OpenTier = Callable[[TierSpec, memoryview], SecondaryTierManager]
"""Opens a tier for a spec, over a writable region of shape (num_blocks, block_bytes)."""

BlockIds = np.ndarray[Any, np.dtype[np.int64]]

Content = Callable[[OffloadKey, int, int], bytes]
"""Returns the content of a block. Its arguments are the key, the size in bytes and the epoch."""

_GUARD = 0xA5  # the byte that fills rows without content
_POLL_S_MIN = 0.0001
_POLL_S_MAX = 0.002
_CACHED_BYTES_MAX = 4096
"""Bytes of the largest block whose content is cached; the cache takes 32 MiB at most."""


def make_keys(count: int, label: str = "block", group_idx: int = 0) -> list[OffloadKey]:
    """Return `count` keys with hashes of 16 bytes; the same arguments give the same keys."""
    return [
        make_offload_key(hashlib.blake2b(f"{label}/{index}".encode(), digest_size=16).digest(), group_idx)
        for index in range(count)
    ]


def block_content(key: OffloadKey, size_bytes: int, epoch: int = 0) -> bytes:
    """Return the bytes that a test stores under `key`; other keys and epochs have other bytes."""
    return (_cached_noise if size_bytes <= _CACHED_BYTES_MAX else _noise)(key, size_bytes, epoch)


def _noise(key: OffloadKey, size_bytes: int, epoch: int) -> bytes:
    seed = hashlib.blake2b(
        get_offload_block_hash(key),
        digest_size=16,
        salt=get_offload_group_idx(key).to_bytes(4, "big"),
        person=epoch.to_bytes(8, "big"),
    ).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "big"))).bytes(size_bytes)


_cached_noise = functools.lru_cache(maxsize=8192)(_noise)  # without the cache, noise would take most tests' time


def compressible_content(key: OffloadKey, size_bytes: int, epoch: int = 0) -> bytes:
    """Return `block_content` with 5 bits of each byte cleared, so that codecs can compress it."""
    noise = np.frombuffer(block_content(key, size_bytes, epoch), dtype=np.uint8)
    return (noise & 0x07).tobytes()


class TierRig:
    """Drives one tier as the manager would, and checks the rules of every job.

    Once no job is in flight, it compares the whole region with the expected bytes. A load may change its own rows only,
    and a store none. An unknown or repeated result fails at once.

    Args:
        open_tier: Called now, and by `reopen`.
        num_blocks, block_bytes: The shape of the region.
        wait_s: Seconds that a job or a lookup may take.
        spec: The tier's spec; by default with the rig's own namespace.
        content: The content of a key; by default incompressible.
    """

    def __init__(
        self,
        open_tier: OpenTier,
        *,
        num_blocks: int,
        block_bytes: int,
        wait_s: float,
        spec: TierSpec | None = None,
        content: Content = block_content,
    ) -> None:
        self._content = content
        self.spec = spec or TierSpec(
            "conformance", block_bytes, bytes(range(16)), {"model": "conformance"}, wants_events=True
        )
        self.block_bytes = block_bytes
        self.epoch = 0
        """The epoch of the content that `store` writes and `load` expects."""
        self._open_tier = open_tier
        self.wait_s = wait_s
        self.job_timeout_s = wait_s
        """Seconds from a job's submission to its deadline."""
        self._region = PrimaryRegion(num_blocks, block_bytes)
        self._region.array[:] = _GUARD
        self._expected = self._region.array.copy()
        self._rows = itertools.cycle(np.random.default_rng(0).permutation(num_blocks).tolist())
        self._job_ids = itertools.count(1)
        self._jobs: dict[JobId, JobMetadata] = {}
        """The jobs in flight."""
        self._results: dict[JobId, JobResult] = {}
        self._succeeded: dict[JobId, set[OffloadKey]] = {}
        self._requests = itertools.count(1)
        self.tier = open_tier(self.spec, self._region.kv_view)

    # -- one job -----------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> JobResult:
        """Store `keys` and return the job's result."""
        return self.wait([self.submit_store(keys, rows, tenant=tenant)])[0]

    def load(self, keys: Sequence[OffloadKey], rows: Sequence[int] | None = None) -> set[OffloadKey]:
        """Load `keys`; return the keys that the tier reports as loaded. Their bytes have been checked."""
        return self.succeeded(self.wait([self.submit_load(keys, rows)])[0])

    def submit_store(
        self,
        keys: Sequence[OffloadKey],
        rows: Sequence[int] | None = None,
        deadline: float | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
    ) -> JobId:
        """Fill rows with the content of `keys` and submit their store, for the share of a tenant."""
        job = self._new_job(keys, rows, deadline, is_promotion=False, tenant=tenant)
        for key, row in zip(keys, job.block_ids, strict=True):
            content = np.frombuffer(self._content(key, self.block_bytes, self.epoch), dtype=np.uint8)
            self._region.array[row] = content
            self._expected[row] = content
        self.tier.submit_store(job)
        self.tier.on_schedule_end()
        return job.job_id

    def submit_load(
        self,
        keys: Sequence[OffloadKey],
        rows: Sequence[int] | None = None,
        deadline: float | None = None,
        request: ReqContext | None = None,
    ) -> JobId:
        """Fill rows with the guard byte, and submit a load of `keys` into them."""
        job = self._new_job(keys, rows, deadline, is_promotion=True, request=request)
        self._region.array[job.block_ids] = _GUARD
        self.tier.submit_load(job)
        self.tier.on_schedule_end()
        return job.job_id

    def wait(self, job_ids: Iterable[JobId]) -> list[JobResult]:
        """Return the results of jobs, in order, once the tier has reported all."""
        wanted = list(job_ids)
        end, pause_s = time.monotonic() + self.wait_s, _POLL_S_MIN
        self.poll()
        while missing := [job_id for job_id in wanted if job_id not in self._results]:
            assert time.monotonic() < end, f"jobs {missing} were not reported within {self.wait_s} s"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)
            self.poll()
        if not self._jobs:
            self.check_region()
        return [self._results[job_id] for job_id in wanted]

    def poll(self) -> int:
        """Collect the finished jobs; return how many are still in flight."""
        for result in self.tier.get_finished():
            assert result.job_id not in self._results, f"job {result.job_id} was reported twice"
            job = self._jobs.pop(result.job_id, None)
            assert job is not None, f"job {result.job_id} was reported, and never submitted"
            self._results[result.job_id] = result
            self._check_result(job, result)
        return len(self._jobs)

    def is_reported(self, job_id: JobId) -> bool:
        """Return whether `poll` has collected the result of a job."""
        return job_id in self._results

    def succeeded(self, result: JobResult) -> set[OffloadKey]:
        """Return the keys that succeeded in a job."""
        return self._succeeded[result.job_id]

    def new_request(self) -> ReqContext:
        """Return a request that the tier knows."""
        request = ReqContext(f"request-{next(self._requests)}")
        self.tier.on_new_request(request)
        return request

    def lookup(self, key: OffloadKey, request: ReqContext | None = None) -> bool:
        """Return the tier's answer once it is not None. By default a new request asks, without an earlier answer."""
        return self._answers(lambda asking: [self.tier.lookup(key, asking)], request)[0]

    def lookup_all(self, keys: Sequence[OffloadKey], request: ReqContext | None = None) -> list[bool]:
        """Return the answers of `lookup_many` once none is None. By default a new request asks."""
        return self._answers(lambda asking: self.tier.lookup_many(keys, asking), request)

    def _answers(self, ask: Callable[[ReqContext], Sequence[bool | None]], request: ReqContext | None) -> list[bool]:
        asking = request or self.new_request()
        end = time.monotonic() + self.wait_s
        while None in (answers := ask(asking)):
            self.tier.on_schedule_end()
            self.poll()
            assert time.monotonic() < end, f"a lookup had no answer within {self.wait_s} s"
            time.sleep(_POLL_S_MIN)
        if request is None:
            self.tier.on_request_finished(asking)
        return [bool(answer) for answer in answers]

    # -- the whole tier ----------------------------------------------------------------------------

    def reopen(self, spec: TierSpec | None = None) -> None:
        """Shut the tier down and open it again, for `spec` if given."""
        self.tier.shutdown()
        self._jobs.clear()
        self.spec = spec or self.spec
        self.tier = self._open_tier(self.spec, self._region.kv_view)

    def check_region(self) -> None:
        """Compare every row with its expected bytes; no job may be in flight."""
        wrong = np.flatnonzero((self._region.array != self._expected).any(axis=1)).tolist()
        assert not wrong, f"blocks {wrong} were written outside a job, or changed by their own store"

    def close(self) -> None:
        """Shut the tier down and release the region."""
        self.tier.shutdown()
        self._region.close()

    def _new_job(
        self,
        keys: Collection[OffloadKey],
        rows: Sequence[int] | None,
        deadline: float | None,
        *,
        is_promotion: bool,
        request: ReqContext | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> JobMetadata:
        if rows is None:  # no order is given: the rows come in random order
            rows = list(itertools.islice(self._rows, len(keys)))
        block_ids: BlockIds = np.array(rows, dtype=np.int64)
        busy = {row for job in self._jobs.values() for row in job.block_ids.tolist()}
        assert not busy & set(block_ids.tolist()), "the test uses a block of a job in flight; give the rig more blocks"
        end = time.monotonic() + self.job_timeout_s if deadline is None else deadline
        asking = request or ReqContext("jobs")
        job = JobMetadata(next(self._job_ids), list(keys), block_ids, is_promotion, asking, end, tenant)
        self._jobs[job.job_id] = job
        return job

    def _check_result(self, job: JobMetadata, result: JobResult) -> None:
        keys = list(job.keys)
        named = keys if result.success else list(result.successful_keys or ())
        if result.success and result.successful_keys is not None:
            assert set(result.successful_keys) == set(keys), "a job that succeeded names other keys than its own"
        assert set(named) <= set(keys), "a result names keys that were not in its job"
        self._succeeded[job.job_id] = set(named)
        if not job.is_promotion:
            return
        for key, row in zip(keys, job.block_ids.tolist(), strict=True):
            if key in self._succeeded[job.job_id]:
                content = self._content(key, self.block_bytes, self.epoch)
                assert self._region.array[row].tobytes() == content, f"block {key.hex()} was loaded with wrong bytes"
            self._expected[row] = self._region.array[row]  # a failed load may leave any bytes in its own blocks
