"""Tiers that hang or lie: they cost hits and nothing else, and are used again once they have recovered.

The gate stays closed until a test opens it, so that a call which waited for a tier would wait for `WAIT_S`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.faulty import FourMethodTier, Gate, HangingTier, HeldJobsTier, Lie, LyingTier
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import ManualClock, wait_until
from tiered_kv.testing.model import StackModel, StackUnderTest
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager

NUM_BLOCKS = 32
BLOCK_BYTES = 256
WAIT_S = 60.0
LIMITS = TierSettings(
    type="tier",
    job_timeout=10.0, lookup_timeout=1.0, breaker_failures=3, breaker_cooldown=2.0,
    store_budget=8 * BLOCK_BYTES, load_budget=8 * BLOCK_BYTES,
)  # fmt: skip
JOB_METHODS = ("submit_store", "submit_load")
DETECTABLE = (
    Lie.HAS_EVERYTHING,
    Lie.STORES_NOTHING,
    Lie.REPORTS_TWICE,
    Lie.REPORTS_NOTHING,
    Lie.REPORTS_UNKNOWN_JOBS,
    Lie.NAMES_UNASKED_KEYS,
)
"""The lies that a manager can see through; the bytes themselves only a tier's own checksums can defend."""

Wrap = Callable[[SecondaryTierManager], SecondaryTierManager]


class Engine(StackModel):
    """An engine over one tier, which compares all bytes that it loads."""

    def __init__(self, wrap: Wrap, gate: Gate, clock: ManualClock) -> None:
        region = PrimaryRegion(NUM_BLOCKS, BLOCK_BYTES)
        manager = TieringOffloadingManager(
            PrimaryRows(CPUBackend(region), enable_events=True),
            [wrap(FourMethodTier(None, region.kv_view, "tier"))],
            settings=[LIMITS],
            clock=clock,
        )
        super().__init__(StackUnderTest(manager, clock, {"hangs": lambda on: (gate.close if on else gate.open)()}))

    def store(self, keys: list[OffloadKey]) -> None:
        """Store blocks as a request does, and wait for the tier where it does not hang."""
        request = ReqContext("storing")
        assert self.begin_store(request, keys), "stores pin more of the primary tier than their budget"
        if self.stores:  # none while a slow transfer from before a reset still has the blocks' rows
            self.complete_store(len(self.stores) - 1, success=True)
        self.manager.on_schedule_end()
        self.manager.on_request_finished(request)
        self.manager.drain_jobs(0.0 if self.faults_on else WAIT_S)

    def load(self, keys: list[OffloadKey]) -> int:
        """Load the prefix of `keys` that is found; return its length."""
        req_id = self.start(keys)
        found = self.look_up(req_id)
        if found:
            self.begin_load(req_id, found)
            self.complete_load(len(self.loads) - 1)
        self.manager.on_schedule_end()
        self.finish(req_id)
        return len(found)

    def begin_promotion(self, keys: list[OffloadKey]) -> None:
        """Ask for blocks until the tier has the job to load them."""
        request, keys = self.requests[self.start(keys)]

        def is_submitted() -> bool:
            self.manager.lookup_many(keys, request)
            self.manager.on_schedule_end()
            return self.manager.jobs_in_flight > 0

        wait_until(is_submitted)

    def evict_all(self) -> None:
        for number in range(NUM_BLOCKS // 4):
            self.store(make_keys(4, f"filler-{self.stack.clock()}-{number}"))

    def is_used_again(self, keys: list[OffloadKey]) -> bool:
        self.stack.clock.advance(LIMITS.breaker_cooldown)
        return self.load(keys) == len(keys)


OpenEngine = Callable[[Wrap], Engine]


@pytest.fixture
def open_engine(gate: Gate, clock: ManualClock, closing: ExitStack) -> OpenEngine:
    def open_one(wrap: Wrap) -> Engine:
        engine = Engine(wrap, gate, clock)
        closing.callback(engine.manager.shutdown, timeout_s=0.1)
        closing.callback(gate.open)
        return engine

    return open_one


@contextmanager
def nobody_waits(gate: Gate) -> Iterator[None]:
    """Open the gate, and fail, where the block takes `WAIT_S`."""
    timer = threading.Timer(WAIT_S, gate.open)
    timer.start()
    try:
        yield
        assert not gate.is_open, "a call waited for the tier"
    finally:
        timer.cancel()
        timer.join()


EVERY_HANG: dict[str, Callable[[SecondaryTierManager, Gate], SecondaryTierManager]] = {
    "jobs": HeldJobsTier,
    "jobs and lookups": lambda tier, gate: HeldJobsTier(tier, gate, hold_lookups=True),
    "all methods": HangingTier,
    "job methods": lambda tier, gate: HangingTier(tier, gate, calls=JOB_METHODS),
    "only loads": lambda tier, gate: HangingTier(tier, gate, calls=JOB_METHODS[1:]),
}


@pytest.mark.parametrize("name", EVERY_HANG)
def test_a_tier_that_hangs_costs_hits_and_is_used_again_when_it_goes_on(
    open_engine: OpenEngine, gate: Gate, name: str
) -> None:
    engine = open_engine(lambda tier: EVERY_HANG[name](tier, gate))
    old = make_keys(4, "old")
    engine.store(old)
    engine.evict_all()
    engine.switch_fault("hangs", True)
    new = [make_keys(4, f"new-{number}") for number in range(40)]
    with nobody_waits(gate):
        if name not in ("jobs and lookups", "all methods"):
            engine.begin_promotion(old)
            engine.stack.clock.advance(LIMITS.job_timeout)
            assert engine.load(old) == 0, "the job expires"
            assert count_of(engine.manager.counters(), "tier", "quarantined_bytes") == 4 * BLOCK_BYTES
        for keys in new:
            engine.store(keys)
            assert engine.load(old) == 0
    engine.settle()  # the late jobs end, and nothing is held any more
    assert count_of(engine.manager.counters(), "tier", "quarantined_bytes") == 0
    assert sum(engine.load(keys) for keys in new) > 0, "each is compared: a late load wrote into nobody's row"
    engine.evict_all()
    wait_until(lambda: engine.is_used_again(old))


@pytest.mark.parametrize("lie", DETECTABLE)
def test_a_tier_that_lies_costs_hits_and_never_a_wrong_byte(open_engine: OpenEngine, lie: Lie) -> None:
    engine = open_engine(lambda tier: LyingTier(tier, lie))
    engine.faults_on.add("lies")  # it may never report a job
    batches = [make_keys(4, f"batch-{number}") for number in range(12)]
    for keys in batches:
        engine.store(keys)
        engine.stack.clock.advance(1.0)
    for keys in batches * 2:
        engine.load(keys)
    assert engine.load(make_keys(4, "absent")) == 0
