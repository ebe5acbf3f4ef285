"""Stacks in simulated time: a seed replays a run exactly, and what goes wrong in one is found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from unittest import mock

import pytest

from tests.support.figures import Figures, Profile
from tests.support.simulation import Failure, Scenario, run
from tests.support.simulation import storage as simulated_storage
from tests.support.simulation.scenario import ACTIONS
from tests.support.simulation.simulation import Simulation
from tests.support.simulation.tiers import SimulatedToolkitTier
from tiered_kv.base import OffloadKey
from tiered_kv.metrics.counters import flat_counts
from tiered_kv.reasons import Reason
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob
from tiered_kv.tiering.promotions import Promotions
from tiered_kv.tiering.requests import LookupState, RequestTable
from tiered_kv.toolkit.jobs import Part, PartQueue
from tiered_kv.toolkit.record import RecordStatus

SEEDS = 100
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


def test_two_seeds_keep_every_promise() -> None:
    failure = first_failure(2)
    assert failure is None, str(failure and failure.shortest())


@pytest.mark.slow
@pytest.mark.trust
def test_no_seed_breaks_a_promise(figures: Figures, profile: Profile) -> None:
    seeds = profile.pick(SEEDS, 50 * SEEDS)
    failure = first_failure(seeds)
    passed = seeds if failure is None else failure.scenario.seed
    figures.add("simulation", seeds, passed, f"{ACTIONS} actions each")
    assert failure is None, str(failure and failure.shortest())


@pytest.mark.slow
def test_a_seed_replays_its_run_exactly() -> None:
    assert history_of(3) == history_of(3)
    assert history_of(3) != history_of(4)


@pytest.mark.slow
@pytest.mark.full
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


def unchecked(
    header: memoryview, payload: memoryview, key: OffloadKey, block: memoryview, namespace_digest: bytes
) -> RecordStatus:
    if len(payload) != len(block):
        return RecordStatus.TRUNCATED
    block[:] = payload
    return RecordStatus.OK


def finish_early(
    promotions: Promotions, job: SubmittedJob, result: JobResult, finish: Callable[..., object] = Promotions.ended
) -> object:
    return None if job.is_expired else finish(promotions, job, result)


def release_at_once(promotions: Promotions, job: SubmittedJob) -> None:
    for key, row in zip(job.metadata.keys, job.rows, strict=True):
        promotions._drop(key, row, Reason.FAILED)
        promotions._rows.forget(row)
        promotions._rows.release([row])


def end_of_any(queue: PartQueue, part: Part, end: Callable[..., object] = PartQueue.end) -> bool:
    end(queue, part)
    return part.start == 0


def refusal_in_this_epoch(
    tier: SimulatedToolkitTier, part: Part, refusal: Callable[..., str] = SimulatedToolkitTier._refusal
) -> str:
    part.job.epoch = tier.epoch
    return refusal(tier, part)


def collect_twice(
    guarded: GuardedTier, collect: Callable[..., Sequence[tuple[SubmittedJob, JobResult]]] = GuardedTier._collect
) -> Sequence[tuple[SubmittedJob, JobResult]]:
    return [*collect(guarded)] * 2


def nothing(*_: object) -> None:
    """Do nothing."""


DEFECTS: dict[str, tuple[list[tuple[object, str, object]], str]] = {
    "a checksum that is not checked": ([(simulated_storage, "decode_record", unchecked)], "hold other bytes"),
    "a block that is released before its transfer ends": (
        [(Promotions, "expired", release_at_once), (Promotions, "ended", finish_early)],
        "row",
    ),
    "a job that never expires": ([(GuardedTier, "_expire", lambda *_: [])], "outlived its deadline"),
    "a promotion that survives a reset": ([(Promotions, "reset", nothing)], ""),
    "a hold that is never released": ([(Promotions, "release_overdue", lambda *_: 0)], "still pinned"),
    "a job that is reported while parts of it run": ([(PartQueue, "end", end_of_any)], ""),
    "a store from before a reset that is published": (
        [(SimulatedToolkitTier, "_refusal", refusal_in_this_epoch)],
        "is not there to be found",
    ),
    "a request that stores after a reset": (
        [(RequestTable, "is_outdated", lambda *_: False)],
        "blocks of old weights are stored",
    ),
    "a request that waits without a bound": (
        [(LookupState, "count_wait", nothing)],
        "answered None after it has waited as long as it may",
    ),
    "a job that is reported twice": ([(GuardedTier, "_collect", collect_twice)], ""),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_replaces_something(defect: str) -> None:
    assert all(hasattr(owner, name) for owner, name, _ in DEFECTS[defect][0])


@pytest.mark.slow
@pytest.mark.trust("planted-defects")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str) -> None:
    patches, text = DEFECTS[defect]
    with ExitStack() as planted:
        for owner, name, instead in patches:
            planted.enter_context(mock.patch.object(owner, name, instead))
        failure = first_failure(PLANTED_DEFECT_SEEDS)
        assert failure is not None, "the planted defect was not found"
        shortest = failure.shortest()
        assert shortest.error.startswith("AssertionError: "), "the defect itself raises, which proves nothing"
        assert text in shortest.error
        assert len(shortest.scenario.actions) < len(failure.scenario.actions)
        assert run(shortest.scenario) is not None, "the shortest scenario does not fail when it is played again"
        assert f"seed {failure.scenario.seed}," in str(shortest)
