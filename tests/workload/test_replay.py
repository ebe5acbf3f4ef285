"""Replay: every block that comes back is checked, and everything that happens is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier, Lie, LyingTier
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.faults import JobWrapperTier
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.request import ChatWorkload, Request, block_key
from tiered_kv.workload.tally import ReplayReport

NUM_BLOCKS = 128
BLOCK_BYTES = 512
CHATS = ChatWorkload(chats=24, turns=5, active_chats=12, turn_blocks=3, system_prompts=2, system_blocks=4)


class AtOnceTier(FourMethodTier):
    """Is called on the scheduler's thread, so that the result does not depend on the timing of another."""

    is_nonblocking = True


Wrap = Callable[[FourMethodTier], SecondaryTierManager]


@dataclass
class Rig:
    """A stack of the primary tier and one tier below it, called "below"."""

    region: PrimaryRegion
    below: AtOnceTier
    manager: TieringOffloadingManager

    def replay(
        self, settings: ReplaySettings | None = None, *, requests: Iterator[Request] | None = None
    ) -> ReplayReport:
        return replay(self.manager, self.region.kv_view, requests or CHATS.requests(), settings)

    def nothing_is_pinned(self) -> bool:
        """Return whether every row of the primary tier can be reserved."""
        assert self.manager.drain_jobs(10.0)
        keys = [block_key(2**63 + number) for number in range(NUM_BLOCKS)]
        output = self.manager.prepare_store(keys, ReqContext("last"))
        self.manager.complete_store(keys, ReqContext("last"), success=False)
        return output is not None


OpenRig = Callable[..., Rig]


@pytest.fixture
def open_rig(closing: ExitStack) -> OpenRig:
    def opened(
        wrap: Wrap = lambda tier: tier, blocks: dict[OffloadKey, bytes] | None = None, store_budget: int | None = None
    ) -> Rig:
        region = PrimaryRegion(NUM_BLOCKS, BLOCK_BYTES)
        below = AtOnceTier(None, region.kv_view, "below")
        below.blocks.update(blocks or {})
        settings = TierSettings(type="below", store_budget=store_budget)
        manager = TieringOffloadingManager(PrimaryRows(CPUBackend(region)), [wrap(below)], settings=[settings])
        closing.callback(manager.shutdown)
        return Rig(region, below, manager)

    return opened


def test_every_block_that_comes_back_is_checked_and_nothing_stays_pinned(open_rig: OpenRig) -> None:
    rig = open_rig()
    report = rig.replay()
    assert report.requests == CHATS.requests_total
    assert report.blocks == sum(len(request.hash_ids) for request in CHATS.requests())
    assert report.hits["cpu"] > 0
    assert report.hits["below"] > 0
    assert report.verified_blocks == sum(report.hits.values())
    assert report.corrupt_blocks == 0
    assert report.blocks == sum(report.hits.values()) + report.misses
    assert report.hit_rate == pytest.approx(1 - report.misses / report.blocks, abs=1e-5)
    assert rig.nothing_is_pinned()
    assert list(report.tiers) == ["cpu", "below"]
    assert report.tiers["cpu"].loaded_bytes == report.verified_blocks * BLOCK_BYTES
    assert report.tiers["cpu"].stored_bytes == report.stored_blocks * BLOCK_BYTES
    assert 0 < report.tiers["below"].loaded_bytes <= report.hits["below"] * BLOCK_BYTES
    assert report.steps > 0
    assert 0 < report.step_us.p50 <= report.step_us.p99 <= report.step_us.max
    assert report.drained


def test_a_second_run_hits_blocks_of_the_first_from_its_first_request_on(open_rig: OpenRig) -> None:
    first = open_rig()
    assert first.replay().first_request_hits == 0
    report = open_rig(blocks=first.below.blocks).replay()
    assert report.first_request_hits == len(next(CHATS.requests()).hash_ids)
    assert report.hit_rate > 0.99


def test_requests_of_a_session_run_one_after_another(open_rig: OpenRig) -> None:
    def steps(*sessions: str) -> int:
        requests = [Request(0, 0, 0, (number,), session) for number, session in enumerate(sessions)]
        report = open_rig().replay(requests=iter(requests))
        assert report.requests == len(requests)
        return report.steps

    assert steps("a", "b", "c") == steps("", "", "") == steps("a")
    assert steps("a", "b", "a") == 2 * steps("a")


@pytest.mark.parametrize("lie", [Lie.FLIPS_BYTES, Lie.LOADS_NOTHING])
def test_wrong_bytes_are_reported_with_their_block_and_tier(open_rig: OpenRig, lie: Lie) -> None:
    report = open_rig(lambda tier: LyingTier(tier, lie)).replay()
    assert report.corrupt_blocks > 0
    assert {block.tier for block in report.corrupt} <= {"cpu", "below"}
    assert len(report.corrupt) <= 10
    assert report.verified_blocks + report.corrupt_blocks == sum(report.hits.values())


def test_a_request_does_not_wait_longer_than_its_deadline(open_rig: OpenRig, gate: Gate) -> None:
    first = open_rig()
    first.replay()
    gate.close()
    rig = open_rig(lambda tier: HeldJobsTier(tier, gate), blocks=first.below.blocks)
    request = next(CHATS.requests())
    report = rig.replay(ReplaySettings(request_timeout_s=0.05, drain_timeout_s=0.0), requests=iter([request]))
    gate.open()
    assert report.timed_out_requests == 1
    assert report.misses == report.blocks == len(request.hash_ids)
    assert not report.drained


class OneJobAStepTier(JobWrapperTier):
    """Ends one job for each time that it is asked, so that it falls behind on any machine."""

    is_nonblocking = True

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner)
        self.waiting: deque[JobMetadata] = deque()

    def submit(self, job: JobMetadata) -> None:
        self.waiting.append(job)

    def get_finished(self) -> Iterable[JobResult]:
        if self.waiting:
            super().submit(self.waiting.popleft())
        return super().get_finished()


def skipped_for_budget(rig: Rig) -> int:
    return count_of(rig.manager.counters()["below"], "skipped_blocks_total", "budget")


def test_a_slow_tier_skips_no_store_and_the_second_run_has_no_miss(open_rig: OpenRig) -> None:
    first = open_rig(OneJobAStepTier, store_budget=40 * BLOCK_BYTES)
    assert first.replay().misses > 0
    assert skipped_for_budget(first) == 0
    assert open_rig(blocks=first.below.blocks).replay().misses == 0


def test_a_store_budget_below_a_chunk_is_room_enough(open_rig: OpenRig) -> None:
    rig = open_rig(OneJobAStepTier, store_budget=3 * BLOCK_BYTES)
    report = rig.replay(requests=iter([Request(0, 0, 0, tuple(range(50)))]))
    assert report.stored_blocks == 50
    assert skipped_for_budget(rig) == 0


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_request_waits_for_store_budget_no_longer_than_its_limit(
    open_rig: OpenRig, gate: Gate, seconds: float
) -> None:
    gate.close()
    rig = open_rig(lambda tier: HeldJobsTier(tier, gate), store_budget=32 * BLOCK_BYTES)
    settings = ReplaySettings(store_timeout_s=seconds, drain_timeout_s=0.0)
    report = rig.replay(settings, requests=iter([Request(0, 0, 0, tuple(range(64)))]))
    assert report.stored_blocks == 64
    assert skipped_for_budget(rig) == 32
    gate.open()
    assert rig.nothing_is_pinned()


def test_stopped_while_it_waits_for_store_budget_it_keeps_none(open_rig: OpenRig, gate: Gate) -> None:
    gate.close()
    rig = open_rig(lambda tier: HeldJobsTier(tier, gate), store_budget=32 * BLOCK_BYTES)
    steps = iter(range(1000))
    requests = [Request(0, 0, 0, tuple(range(first, first + 64))) for first in (0, 100)]
    report = replay(rig.manager, rig.region.kv_view, iter(requests), should_stop=lambda: next(steps) == 9)
    assert report.interrupted
    gate.open()
    assert rig.nothing_is_pinned()
    assert rig.manager.reserve_stores(32)


def test_blocks_that_the_primary_tier_has_no_room_for_are_counted(open_rig: OpenRig) -> None:
    report = open_rig().replay(
        ReplaySettings(store_blocks=NUM_BLOCKS + 1, store_timeout_s=0.0),
        requests=iter([Request(0, 0, 0, tuple(range(2 * NUM_BLOCKS)))]),
    )
    assert report.stored_blocks == 0
    assert report.skipped_stores == 2 * NUM_BLOCKS


def test_stopped_early_it_reports_what_it_has_and_releases_everything(open_rig: OpenRig) -> None:
    rig = open_rig()
    steps = iter(range(1000))
    report = replay(rig.manager, rig.region.kv_view, CHATS.requests(), should_stop=lambda: next(steps) == 15)
    assert report.interrupted
    assert 0 < report.requests < CHATS.requests_total
    assert report.steps == 15
    assert report.verified_blocks == sum(report.hits.values())
    assert rig.nothing_is_pinned()


def test_a_bad_request_ends_the_replay_and_releases_everything(open_rig: OpenRig) -> None:
    def requests() -> Iterator[Request]:
        for number, request in enumerate(CHATS.requests()):
            if number == 30:
                raise ConfigError("no request", location="trace:31")
            yield request

    rig = open_rig()
    with pytest.raises(ConfigError, match="trace:31"):
        rig.replay(requests=requests())
    assert rig.nothing_is_pinned()
    assert rig.replay().corrupt_blocks == 0
