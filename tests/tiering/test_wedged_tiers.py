"""Tiers that hang for ever, fail always, or answer ten seconds late: they cost hits, and nothing else.

In every test: each call of the manager returns at once, every request comes to its end, no row is used again while a
transfer may still touch it, and the tier is used again once it has recovered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.counters import count_of
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.faults import HangingTier, HeldJobsTier
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.lies import DETECTABLE, Lie, LyingTier
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.testing.watch import RowLedger, WatchedTier
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager

NUM_BLOCKS = 32
BLOCK_BYTES = 256
CALL_LIMIT_S = 0.05
HELD_UP_CALLS_MAX = 5
"""Calls of one test that the machine may hold up."""
WAIT_S = 60.0
LIMITS = TierSettings(
    type="tier",
    job_timeout=10.0, lookup_timeout=1.0, breaker_failures=3, breaker_cooldown=2.0,
    store_budget=8 * BLOCK_BYTES, load_budget=8 * BLOCK_BYTES,
)  # fmt: skip

Returned = TypeVar("Returned")
MakeTier = Callable[[SecondaryTierManager, Gate], SecondaryTierManager]


class Engine:
    """An engine over one tier, which times every call that it makes and remembers what every open row must hold."""

    def __init__(self, make_tier: Callable[[SecondaryTierManager], SecondaryTierManager], clock: ManualClock) -> None:
        self.clock = clock
        self.region = PrimaryRegion(NUM_BLOCKS, BLOCK_BYTES)
        self.storage = FourMethodTier(None, self.region.kv_view, "tier")
        self.manager = TieringOffloadingManager(
            CPUOffloadingManager(CPUBackend(self.region)),
            [make_tier(self.storage)],
            settings=[LIMITS],
            clock=self.clock,
        )
        self.took_s: list[float] = []
        self._request_number = 0

    def call(self, method: Callable[..., Returned], *arguments: object) -> Returned:
        """Make one call of the manager, and time it."""
        begin = time.perf_counter()
        returned = method(*arguments)
        self.took_s.append(time.perf_counter() - begin)
        return returned

    def assert_calls_returned_at_once(self) -> None:
        # The machine that runs the tests may hold up any one call. A tier that is waited for holds up many: at least
        # one for each store, of which no test makes fewer than nine.
        slow = [took_s for took_s in self.took_s if took_s > CALL_LIMIT_S]
        allowed = HELD_UP_CALLS_MAX + len(self.took_s) // 100
        assert len(slow) <= allowed, f"{len(slow)} of {len(self.took_s)} calls: {sorted(slow)[-5:]}"

    def request(self) -> ReqContext:
        self._request_number += 1
        context = ReqContext(f"request-{self._request_number}")
        self.call(self.manager.on_new_request, context)
        return context

    def store(self, keys: Sequence[OffloadKey]) -> bool:
        """Store `keys` as a request would; return whether the primary tier had room."""
        request = self.request()
        output = self.call(self.manager.prepare_store, keys, request)
        if output is not None:
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            rows = output.store_spec.block_ids.tolist()
            self._fill(rows, output.keys_to_store)
            self.call(self.manager.on_schedule_end)
            self._check(rows, output.keys_to_store)  # a late load that writes into a row given to us shows here
            self.call(self.manager.complete_store, output.keys_to_store, request)
        self.call(self.manager.on_schedule_end)
        self.call(self.manager.on_request_finished, request)
        return output is not None

    def load(
        self,
        keys: Sequence[OffloadKey],
        *,
        step_s: float = 0.5,
        limit_s: float = 200.0,
        time_passes: Callable[[], bool] = lambda: True,
    ) -> int:
        """Ask for `keys` until every answer is there, load what is found, and return how many blocks that was.

        Each step takes `step_s` of the manual clock, as soon as `time_passes`: until then a healthy tier's thread may
        take as long as it likes.
        """
        request = self.request()
        end, manual_end_s = time.monotonic() + WAIT_S, self.clock() + limit_s
        while None in (answers := self.call(self.manager.lookup_many, keys, request)):
            assert self.clock() < manual_end_s, f"no end after {limit_s} s"
            assert time.monotonic() < end, f"no end within {WAIT_S} s"
            self.call(self.manager.on_schedule_end)
            time.sleep(0.002)  # for the threads of a healthy tier; the tiers' faults go by the manual clock
            if time_passes():
                self.clock.advance(step_s)
        found = list(keys[: ([*answers, False]).index(False)])
        if found:
            rows = self.call(self.manager.prepare_load, found, request).block_ids.tolist()
            self._check(rows, found)
            self.call(self.manager.complete_load, found, request)
        self.call(self.manager.on_schedule_end)
        self.call(self.manager.on_request_finished, request)
        return len(found)

    def overwrite_primary(self) -> None:
        """Evict whatever can be evicted, by storing blocks that nobody asks for again."""
        for number in range(NUM_BLOCKS // 4):
            self.store(make_keys(4, f"filler-{self._request_number}-{number}"))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Let the manager work, and time pass, until `condition` holds."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"not within {WAIT_S} s: {what}"
            self.call(self.manager.on_schedule_end)
            self.clock.advance(0.01)
            time.sleep(0.002)

    def counter(self, *path: str) -> int:
        return count_of(self.manager.counters(), "tier", *path)

    def close(self) -> None:
        self.manager.shutdown(timeout_s=0.5)
        self.region.close()

    def _fill(self, rows: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        for row, key in zip(rows, keys, strict=True):
            self.region.array[row] = np.frombuffer(block_content(key, BLOCK_BYTES), dtype=np.uint8)

    def _check(self, rows: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        for row, key in zip(rows, keys, strict=True):
            assert self.region.array[row].tobytes() == block_content(key, BLOCK_BYTES), f"row {row} has other bytes"


OpenEngine = Callable[[Callable[[SecondaryTierManager], SecondaryTierManager]], Engine]


@pytest.fixture
def open_engine(gate: Gate, clock: ManualClock) -> Iterator[OpenEngine]:
    """Open engines that are closed, with the gate open, when the test has ended."""
    engines: list[Engine] = []

    def open_one(make_tier: Callable[[SecondaryTierManager], SecondaryTierManager]) -> Engine:
        engines.append(Engine(make_tier, clock))
        return engines[-1]

    yield open_one
    gate.open()
    for engine in engines:
        engine.close()


def jobs_hang(inner: SecondaryTierManager, gate: Gate) -> SecondaryTierManager:
    return HeldJobsTier(inner, gate)


def jobs_and_lookups_hang(inner: SecondaryTierManager, gate: Gate) -> SecondaryTierManager:
    return HeldJobsTier(inner, gate, hold_lookups=True)


def all_methods_hang(inner: SecondaryTierManager, gate: Gate) -> SecondaryTierManager:
    return HangingTier(inner, gate)


def job_methods_hang(inner: SecondaryTierManager, gate: Gate) -> SecondaryTierManager:
    return HangingTier(inner, gate, calls=("submit_store", "submit_load"))


def only_loads_hang(inner: SecondaryTierManager, gate: Gate) -> SecondaryTierManager:
    return HangingTier(inner, gate, calls=("submit_load",))


EVERY_HANG = [jobs_hang, jobs_and_lookups_hang, all_methods_hang, job_methods_hang, only_loads_hang]


@pytest.mark.parametrize("make_tier", EVERY_HANG)
def test_a_tier_that_hangs_costs_hits_and_is_used_again_when_it_goes_on(
    open_engine: OpenEngine, gate: Gate, make_tier: MakeTier
) -> None:
    engine = open_engine(lambda inner: make_tier(inner, gate))
    old = make_keys(4, "old")
    engine.store(old)
    engine.wait_for(lambda: len(engine.storage.blocks) == 4, "the store")
    engine.overwrite_primary()
    engine.wait_for(lambda: engine.manager.jobs_in_flight == 0, "idleness")

    gate.close()
    for number in range(40):
        engine.store(make_keys(4, f"new-{number}"))
        engine.load(old)
    engine.assert_calls_returned_at_once()

    gate.open()
    engine.wait_for(lambda: engine.manager.jobs_in_flight == 0, "the end of the late jobs")
    assert engine.counter("quarantined_bytes") == 0
    engine.overwrite_primary()
    engine.wait_for(lambda: engine.load(old, step_s=0.02) == 4, "a hit after recovery")
    engine.assert_calls_returned_at_once()


@pytest.mark.parametrize("make_tier", [jobs_hang, job_methods_hang, only_loads_hang])
def test_rows_of_a_load_that_hangs_are_not_given_to_anybody_else(
    open_engine: OpenEngine, gate: Gate, make_tier: MakeTier
) -> None:
    engine = open_engine(lambda inner: make_tier(inner, gate))
    old = make_keys(4, "old")
    engine.store(old)
    engine.wait_for(lambda: len(engine.storage.blocks) == 4, "the store")
    engine.overwrite_primary()
    engine.wait_for(lambda: engine.manager.jobs_in_flight == 0, "idleness")

    gate.close()
    # The job expires: a miss. Before there is one, its tier's thread has to answer that it has the blocks.
    assert engine.load(old, time_passes=lambda: engine.manager.jobs_in_flight > 0) == 0
    assert engine.counter("quarantined_bytes") >= 4 * BLOCK_BYTES
    backend = engine.manager.primary.backend
    primary = engine.manager.primary
    assert backend.get_num_free_blocks() + len(primary.blocks) <= NUM_BLOCKS - 4
    engine.region.array[:] = 0x5A
    engine.storage.blocks = {key: bytes(BLOCK_BYTES) for key in old}  # what the late load will write: zeros
    gate.open()
    engine.wait_for(lambda: engine.counter("quarantined_bytes") == 0, "the release of the quarantine")
    written = np.flatnonzero((engine.region.array == 0).all(axis=1))
    in_use = {block.block_id for block in primary.blocks.values()}
    assert not in_use & set(written.tolist()), "a late load wrote into rows that had been given away"


def test_a_hang_takes_no_more_memory_than_the_budgets(open_engine: OpenEngine, gate: Gate) -> None:
    ledger = RowLedger()
    watched: list[WatchedTier] = []

    def make_tier(inner: SecondaryTierManager) -> SecondaryTierManager:
        watched.append(WatchedTier(HeldJobsTier(inner, gate), ledger))
        return watched[0]

    engine = open_engine(make_tier)
    gate.close()
    for number in range(500):
        assert engine.store(make_keys(4, f"new-{number}")), "stores pin more of the primary tier than their budget"
        engine.clock.advance(0.2)
    assert watched[0].store_blocks_peak <= 8
    assert engine.counter("skipped_blocks_total") > 0
    gate.open()
    engine.wait_for(lambda: engine.manager.jobs_in_flight == 0, "the end of the late jobs")
    assert not ledger.violations


def test_methods_that_hang_queue_up_no_more_than_the_budgets(open_engine: OpenEngine, gate: Gate) -> None:
    engine = open_engine(lambda inner: HangingTier(inner, gate))
    gate.close()
    for number in range(500):
        assert engine.store(make_keys(4, f"new-{number}"))
        engine.load(make_keys(4, f"absent-{number}"))
        assert engine.manager.jobs_in_flight <= 16
    engine.assert_calls_returned_at_once()


@pytest.mark.parametrize("lie", DETECTABLE)
def test_a_tier_that_lies_costs_hits_and_never_a_wrong_byte(open_engine: OpenEngine, lie: Lie) -> None:
    engine = open_engine(lambda inner: LyingTier(inner, lie))
    batches = [make_keys(4, f"batch-{number}") for number in range(12)]
    for keys in batches:
        assert engine.store(keys)
        engine.clock.advance(1.0)
    for keys in batches * 2:
        engine.load(keys)  # compares every byte of what it finds
    engine.load(make_keys(4, "absent"))
    engine.assert_calls_returned_at_once()
