"""A model of a whole stack: a dictionary of the answers that the stack may give.

The state machine and simulations call it, on the test's thread, which acts as the scheduler's. What must stay true: its
checks hold at every timing of the stack's threads.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.counters import count_of, flat_counts
from tiered_kv.testing.control import ManualClock
from tiered_kv.testing.faults import JobWrapperTier
from tiered_kv.testing.rig import block_content
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager

_PATIENT_ROUNDS = 100
"""Rounds of a lookup without faults, after which each further round advances the clock."""
_ROUNDS_MAX = 200
"""Limit of the rounds of a lookup."""
_ROUND_S = 0.001
_CLOCK_STEP_S = 5.0
_MUCH_STORED = 8  # blocks


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


@dataclass(frozen=True, slots=True)
class StackUnderTest:
    """A stack, and the means to disturb it."""

    manager: TieringOffloadingManager  # made with `clock`
    clock: ManualClock
    faults: Mapping[str, Callable[[bool], None]] = field(default_factory=dict)  # each switches one on or off
    corrupt: Callable[[], None] = lambda: None  # damages the blocks that the tiers have stored
    ledger: RowLedger = field(default_factory=RowLedger)  # shared by the `WatchedTier`s of the stack


@dataclass(frozen=True, slots=True)
class EngineTransfer:
    """A prepared load or store of an engine: its rows, and their expected content."""

    request: ReqContext
    keys: list[OffloadKey]
    rows: list[int]
    content: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    epoch: int


class StackModel:
    """Acts as the engine of a stack, and checks the stack's answers and bytes.

    A stack may lose any block at any time. It must not find a block that was not stored since the last reset. A loaded
    block has the stored bytes. A request computes its blocks with the weights of the epoch in which it began.
    """

    def __init__(self, stack: StackUnderTest) -> None:
        self.stack = stack
        self.stored: set[OffloadKey] = set()  # blocks that the stack may find
        self.epoch = 0  # the number of resets
        self.requests: dict[str, tuple[ReqContext, list[OffloadKey]]] = {}  # the running ones, by id
        self.loads: list[EngineTransfer] = []
        self.stores: list[EngineTransfer] = []
        self.faults_on: set[str] = set()
        self._outdated: set[str] = set()  # running requests that began before a reset
        self._request_numbers = itertools.count()

    @property
    def manager(self) -> TieringOffloadingManager:
        return self.stack.manager

    @property
    def has_much_stored(self) -> bool:
        """Whether a reset, a reopening or a corruption would have an effect."""
        return len(self.stored) >= _MUCH_STORED

    # Requests.

    def start(self, keys: Sequence[OffloadKey]) -> str:
        """Begin a request for `keys`, and return its id."""
        request = ReqContext(f"request-{next(self._request_numbers)}")
        self.requests[request.req_id] = (request, list(keys))
        self.manager.on_new_request(request)
        return request.req_id

    def finish(self, req_id: str) -> None:
        """End a request; its transfers may be completed later."""
        request, _ = self.requests.pop(req_id)
        self._outdated.discard(req_id)
        self.manager.on_request_finished(request)

    # Loads.

    def look_up(self, req_id: str) -> list[OffloadKey]:
        """Look up a request's keys in some steps, until no answer is None; return the prefix that is found."""
        request, keys = self.requests[req_id]
        for round_number in range(_ROUNDS_MAX):
            answers = self.manager.lookup_many(keys, request)
            if None not in answers:
                break
            self.manager.on_schedule_end()
            if not self.manager.drain_jobs(0.0 if self.faults_on else 5.0):
                self.manager.poll()
            if round_number >= (5 if self.faults_on else _PATIENT_ROUNDS):
                self.stack.clock.advance(_CLOCK_STEP_S)
            time.sleep(_ROUND_S)
        assert None not in answers, f"answers are still None after {_ROUNDS_MAX} steps: {answers}"
        for key, answer in zip(keys, answers, strict=True):
            self.check_answer(key, answer, request)
        return list(itertools.takewhile(lambda key: answers[keys.index(key)], keys))

    def check_answer(self, key: OffloadKey, answer: bool | None, request: ReqContext) -> None:
        """Check that a found block was stored, and that a request from before a reset finds nothing."""
        assert not answer or key in self.stored, f"block {key.hex()} was found, and is not there to be found"
        is_outdated = request.req_id in self._outdated
        assert answer is False or not is_outdated, f"{request.req_id} began before a reset, and finds {key.hex()}"

    def begin_load(self, req_id: str, keys: list[OffloadKey]) -> None:
        """Prepare a load of keys that were found in this step, and compare their rows."""
        request, _ = self.requests[req_id]
        spec = self.manager.prepare_load(keys, request)
        self.loads.append(EngineTransfer(request, keys, spec.block_ids.tolist(), self._content(keys), self.epoch))
        self.check_transfers()

    def complete_load(self, number: int) -> None:
        load = self.loads.pop(number)
        self.manager.complete_load(load.keys, load.request)

    # Stores.

    def begin_store(self, request: ReqContext, keys: Sequence[OffloadKey]) -> bool:
        """Prepare a store and write its rows; return whether the stack had room."""
        output = self.manager.prepare_store(keys, request)
        if output is None:
            return False
        assert request.req_id not in self._outdated or not output.keys_to_store, "blocks of old weights are stored"
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        rows = output.store_spec.block_ids.tolist()
        assert len(set(rows)) == len(rows) == len(output.keys_to_store)
        assert set(output.keys_to_store) <= set(keys)
        content = self._content(output.keys_to_store)
        self.manager.primary.backend.region.array[rows] = content
        if rows:
            self.stores.append(EngineTransfer(request, output.keys_to_store, rows, content, self.epoch))
        self.check_transfers()
        return True

    def complete_store(self, number: int, *, success: bool) -> None:
        """End a store; if it succeeded, with no reset since its beginning, the stack must find its blocks at once."""
        store = self.stores.pop(number)
        is_current = success and store.epoch == self.epoch
        if is_current:
            self.stored.update(store.keys)
        self.manager.complete_store(store.keys, store.request, success)
        if is_current:
            probe = ReqContext("probe")  # another request, since the audit may withhold blocks from this one
            assert all(self.manager.lookup(key, probe) for key in store.keys), "a block is lost as soon as it is stored"
            self.manager.on_request_finished(probe)

    # The whole stack.

    def reset(self) -> None:
        """Reset the stack, and change the content of all keys. The requests that run keep the old weights."""
        self.manager.reset_cache()
        self._outdated.update(self.requests)
        self.epoch += 1
        self.stored.clear()

    def switch_fault(self, name: str, on: bool) -> None:
        self.stack.faults[name](on)
        (self.faults_on.add if on else self.faults_on.discard)(name)

    def settle(self) -> None:
        """End all faults, transfers and requests, wait for all jobs, and check that no block is pinned."""
        for name in list(self.faults_on):
            self.switch_fault(name, False)
        while self.loads:
            self.complete_load(0)
        while self.stores:
            self.complete_store(0, success=False)
        for req_id in list(self.requests):
            self.finish(req_id)
        self.manager.on_schedule_end()
        assert self.manager.drain_jobs(10.0), "jobs were never reported, with no fault left"
        self.manager.on_schedule_end()
        self._check_nothing_held()

    def reopen(self, stack: StackUnderTest) -> None:
        """Continue with another stack on the same storage, after `settle` and the shutdown of this one."""
        self.stack = stack

    # Invariants.

    def check_transfers(self) -> None:
        """Compare the rows of all open transfers with their content, and with the rows of jobs in flight."""
        region = self.manager.primary.backend.region.array
        for kind, transfers in (("load", self.loads), ("store", self.stores)):
            for transfer in transfers:
                assert np.array_equal(region[transfer.rows], transfer.content), (
                    f"the blocks of a {kind} hold other bytes"
                )
        written = [row for store in self.stores for row in store.rows]
        assert len(set(written)) == len(written), "two stores were given one row"
        loaded = {row for load in self.loads for row in load.rows}
        assert not loaded & set(written), "a row that is being loaded from was given to a store"
        ledger = self.stack.ledger
        assert not ledger.violations, ledger.violations
        assert not (loaded | set(written)) & ledger.written, "a load from a tier writes a row that an engine uses"
        assert not set(written) & set(+ledger.read), "a store to a tier reads a row that an engine writes"

    def check_counts(self) -> None:
        """Check that blocks add up and that no counter is below zero."""
        backend = self.manager.primary.backend
        free = backend.get_num_free_blocks()
        assert 0 <= free <= backend.num_blocks
        assert len(self.manager.primary) <= backend.num_blocks - free
        for tier, counters in self.manager.counters().items():
            assert all(value >= 0 for _, value in flat_counts(counters)), (tier, counters)
            assert not count_of(counters, "audited_blocks_total", "different"), (
                f"the audit reports wrong bytes of {tier}"
            )

    def _check_nothing_held(self) -> None:
        primary = self.manager.primary
        held = {key.hex(): block.ref_cnt for key, block in primary.blocks.items() if block.ref_cnt}
        assert not held, f"blocks are still pinned or being written, with nothing in flight: {held}"
        backend = primary.backend
        assert len(primary) + backend.get_num_free_blocks() == backend.num_blocks, "blocks were lost"

    def _content(self, keys: Sequence[OffloadKey]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        block_bytes = self.manager.primary.backend.block_size
        joined = b"".join(block_content(key, block_bytes, self.epoch) for key in keys)
        return np.frombuffer(joined, dtype=np.uint8).reshape(len(keys), block_bytes)


class WatchedTier(JobWrapperTier):
    """Notes in the ledger, which all tiers of the stack share, where the manager violates the rules for rows.

    Two jobs must not use one row if one of them writes it. The source of a store must not change from submission to
    report, even if the job has expired meanwhile. The wrapped tier must return at once: the manager's thread calls.
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
