"""Stacks in simulated time: a seed replays a run exactly, and what goes wrong in one is found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.support.figures import Figures, Profile
from tests.support.simulation import Failure, Scenario, run
from tests.support.simulation import storage as simulated_storage
from tests.support.simulation.__main__ import main
from tests.support.simulation.scenario import ACTIONS
from tests.support.simulation.simulation import Simulation
from tests.support.simulation.toolkit_tier import SimulatedToolkitTier
from tiered_kv.base import OffloadKey
from tiered_kv.counters import flat_counts
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.jobs import Job
from tiered_kv.tiering.promotion import Promotions
from tiered_kv.tiering.search import Search
from tiered_kv.toolkit.jobs import Part
from tiered_kv.toolkit.queue import PartQueue
from tiered_kv.toolkit.record import RecordStatus

SEEDS = 1000
PLANTED_DEFECT_SEEDS = 500


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tiers raise on purpose here, and the manager logs it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def first_failure(seeds: int) -> Failure | None:
    return next((failure for seed in range(seeds) if (failure := run(Scenario.of_seed(seed))) is not None), None)


def history_of(seed: int) -> list[tuple[object, ...]]:
    """Return what a run shows of itself, action by action."""
    scenario = Scenario.of_seed(seed)
    simulation = Simulation(seed)
    history: list[tuple[object, ...]] = []
    try:
        for action in scenario.actions:
            simulation.act(action)
            stored = sorted(key.hex() for key in simulation.model.stored)
            history.append((simulation.world.clock(), stored, simulation.manager.counters()))
    finally:
        simulation.close()
    return history


def test_twenty_seeds_keep_every_promise() -> None:
    failure = first_failure(20)
    assert failure is None, str(failure and failure.shortest())


@pytest.mark.slow
@pytest.mark.trust
def test_a_thousand_seeds_keep_every_promise(figures: Figures, profile: Profile) -> None:
    """Or ten thousand, in the full profile."""
    seeds = SEEDS * (10 if profile is Profile.FULL else 1)
    failure = first_failure(seeds)
    passed = seeds if failure is None else failure.scenario.seed
    figures.add("simulation", seeds, passed, f"{ACTIONS} actions each")
    assert failure is None, str(failure and failure.shortest())


def test_a_seed_replays_its_run_exactly() -> None:
    assert history_of(3) == history_of(3)
    assert history_of(3) != history_of(4)


def test_the_command_says_how_many_seeds_it_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5:7", "--actions", "30"]) == 0
    assert capsys.readouterr().out == "2 seeds, 0 failed\n"


@pytest.mark.slow
def test_runs_reach_what_they_are_there_to_reach() -> None:
    """Over some seeds every kind of event that the promises are about has really happened."""
    seen: set[tuple[str, ...]] = set()
    for seed in range(40):
        for _, _, counters in history_of(seed)[-1:]:
            assert isinstance(counters, dict)
            for name, tier in counters.items():
                if name != "cpu":
                    seen |= {path for path, value in flat_counts(tier) if value}
    for counter in (
        ("loaded_blocks_total",),
        ("stored_blocks_total",),
        ("expired_jobs_total",),
        ("late_jobs_total",),
        ("breaker_opened_total",),
        ("failed_blocks_total", "load", "absent"),
        ("failed_blocks_total", "load", "truncated"),
        ("failed_blocks_total", "load", "wrong_key"),
        ("failed_blocks_total", "store", "io_error"),
        ("exceptions_total",),
        ("unknown_results_total",),
        ("skipped_blocks_total", "budget"),
    ):
        assert counter in seen, f"no run had any {counter}: {seen}"


# Defects planted on purpose: the simulation must find each, and shrink its history.


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_checksum_that_is_not_checked_is_found() -> None:
    def unchecked(
        header: memoryview, payload: memoryview, key: OffloadKey, block: memoryview, namespace_digest: bytes
    ) -> RecordStatus:
        if len(payload) != len(block):
            return RecordStatus.TRUNCATED
        block[:] = payload
        return RecordStatus.OK

    with mock.patch.object(simulated_storage, "decode_record", unchecked):
        assert_found("hold other bytes")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_block_that_is_released_before_its_transfer_ends_is_found() -> None:
    finish = Promotions.finish

    def release_at_once(promotions: Promotions, job: Job) -> None:
        for block in job.blocks:
            promotions._drop(block.key, block)
            promotions._primary.forget(block)
            promotions._primary.backend.free(block)

    def ignore_expired(promotions: Promotions, job: Job, result: object) -> object:
        return [] if job.is_expired else finish(promotions, job, result)  # type: ignore[arg-type]  # passed through

    with (
        mock.patch.object(Promotions, "expire", release_at_once),
        mock.patch.object(Promotions, "finish", ignore_expired),
    ):
        assert_found("row")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_job_that_never_expires_is_found() -> None:
    with mock.patch.object(GuardedTier, "expire", return_value=[]):
        assert_found("outlived its deadline")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_promotion_that_survives_a_reset_is_found() -> None:
    with mock.patch.object(Promotions, "reset"):
        assert_found("")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_hold_that_is_never_released_is_found() -> None:
    with mock.patch.object(Promotions, "release_overdue", return_value=0):
        assert_found("still pinned")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_job_that_is_reported_while_parts_of_it_run_is_found() -> None:
    end = PartQueue.end

    def end_of_any(queue: PartQueue, part: Part) -> bool:
        end(queue, part)
        return part.start == 0

    with mock.patch.object(PartQueue, "end", end_of_any):
        assert_found("")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_store_from_before_a_reset_that_is_published_is_found() -> None:
    move = SimulatedToolkitTier._step

    def step_in_this_epoch(tier: SimulatedToolkitTier, transfer: Any) -> None:
        transfer.part.job.epoch = tier.epoch
        move(tier, transfer)

    with mock.patch.object(SimulatedToolkitTier, "_step", step_in_this_epoch):
        assert_found("is not there to be found")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_request_that_waits_without_a_bound_is_found() -> None:
    with mock.patch.object(Search, "_count_wait"):
        assert_found("answered None after it has waited as long as it may")


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
def test_a_job_that_is_reported_twice_is_found() -> None:
    collect = GuardedTier.collect

    def collect_twice(guarded: GuardedTier) -> list[tuple[Job, JobResult]]:
        return 2 * collect(guarded)

    with mock.patch.object(GuardedTier, "collect", collect_twice):
        assert_found("")


def assert_found(text: str) -> None:
    failure = first_failure(PLANTED_DEFECT_SEEDS)
    assert failure is not None, "the planted defect was not found"
    shortest = failure.shortest()
    assert text in shortest.error
    assert len(shortest.scenario.actions) < len(failure.scenario.actions)
    assert run(shortest.scenario) is not None, "the shortest scenario does not fail when it is played again"
    assert f"seed {failure.scenario.seed}," in str(shortest)
