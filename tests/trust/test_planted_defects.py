"""Defects planted in the product on purpose: each must be found by the races and crashes.

The simulation's are in `tests/support_tests/test_simulation.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest

import tiered_kv_memory.tier
import tiered_kv_nvme.reader
from tests.support.crash_cases import FS, NVME, CrashCases
from tests.support.crash_scenario import CrashScenario
from tests.support.crash_server import Case
from tests.support.disks import FlushOrder
from tests.support.mounts import PowerLoss
from tests.support.race_cases import BLOCK_BYTES, race_damage, race_late_workers, race_loads_with_stores, stack_of
from tests.support.races import Prompts, open_guarded, problems_at_rest
from tests.support.racing_scheduler import RacingScheduler
from tests.support.shortages import Resource, Shortage
from tests.support.stacks import manager_of
from tests.support.syscalls import Fault
from tests.trust import defective_crash_server
from tests.trust.test_resources import ServerSubject
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.server import allocation
from tiered_kv.server.memory import HostRegion
from tiered_kv.tiering.base import JobMetadata, JobResult
from tiered_kv.tiering.cascade import Cascade
from tiered_kv.tiering.guarded import SubmittedJob
from tiered_kv_memory.tier import MemoryTier
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.tier import NvmeTier

pytestmark = [pytest.mark.trust("planted-defects"), pytest.mark.slow]

SECONDS = 2.0
SEEDS = range(1, 21)
"""A race tries the next seed until the defect is found: the machine decides the timing of threads."""
SEED = 1
WRITES_TRIED = 48
CASES_A_ROUND = 8


def assert_found(rounds: Iterable[Sequence[str]], *texts: str) -> None:
    """Go on until a problem says one of the texts."""
    said: list[str] = []
    for problems in rounds:
        said += problems
        if any(text in problem for problem in said for text in texts):
            return
    pytest.fail(f"the planted defect was not found: {said}")


MEMORY: dict[str, object] = {"type": "memory", "capacity": 1 << 20}
MEMORY_PLACES: list[tuple[object, str]] = [
    (tiered_kv_memory.tier, "decode_record"),
    (tiered_kv_memory.tier, "encode_record"),
]


def test_a_store_s_blocks_released_before_its_worker_has_ended_are_found_by_late_workers() -> None:
    ended = Cascade.ended

    def release_at_once(cascade: Cascade, job: SubmittedJob) -> None:
        cascade._rows.unpin(job.rows)

    def ignore_expired(cascade: Cascade, job: SubmittedJob, result: JobResult) -> None:
        if not job.is_expired:
            ended(cascade, job, result)

    # A late store then keeps another block's bytes, with a checksum that fits them.
    with (
        mock.patch.object(Cascade, "expired", release_at_once),
        mock.patch.object(Cascade, "ended", ignore_expired),
    ):
        config = stack_of({**MEMORY, "job_timeout": 0.03, "breaker_failures": 1_000_000})
        races = (race_late_workers(config, MEMORY_PLACES, seed=seed, seconds=SECONDS)[0] for seed in SEEDS)
        assert_found(races, "holds other bytes")


class EagerTier(NvmeTier):
    """Answers True for a block as soon as its store is submitted."""

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.promised = frozenset(job_metadata.keys)
        super().submit_store(job_metadata)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return [
            key in self.promised or answer
            for key, answer in zip(keys, super().lookup_many(keys, req_context), strict=True)
        ]

    promised: frozenset[OffloadKey] = frozenset()


def test_a_block_that_is_answered_before_its_write_is_found_by_loads_amid_stores(tmp_path: Path) -> None:
    settings = NvmeSettings(path=str(tmp_path / "nvme"), capacity=4 << 20, segment=256 << 10)

    def race(seed: int) -> list[str]:
        return race_loads_with_stores(
            lambda spec, view: EagerTier(spec, view, "nvme", settings),
            seed=seed,
            seconds=SECONDS,
            block_bytes=BLOCK_BYTES,
        )[0]

    assert_found(map(race, SEEDS), "could not be loaded")


def test_a_checksum_that_nvme_does_not_check_is_found_by_damage_amid_loads(tmp_path: Path) -> None:
    entry: dict[str, object] = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": 1 << 20, "segment": 1 << 17}

    class Unchecked(bytes):
        """A checksum that is equal to every other."""

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = bytes.__hash__

    with mock.patch.object(tiered_kv_nvme.reader, "checksum", return_value=Unchecked()):
        races = (race_damage(stack_of(entry), tmp_path / "nvme", seed=seed, seconds=SECONDS)[0] for seed in SEEDS)
        assert_found(races, "holds other bytes")


def test_a_tier_that_forgets_nothing_at_a_reset_is_found_by_a_scheduler_that_resets() -> None:
    with mock.patch.object(MemoryTier, "reset_cache", return_value=True):
        stack, guard = open_guarded(stack_of(MEMORY))
        with stack:
            scheduler = RacingScheduler(manager_of(stack), stack.region, Prompts(BLOCK_BYTES), seed=SEED)
            limit_s = SECONDS * len(SEEDS)
            race = scheduler.run(limit_s, reset_every=100, until=lambda: bool(scheduler.race.problems))
            scheduler.finish()
            problems = [*race.problems, *problems_at_rest(manager_of(stack), guard)]
    assert any("holds other bytes" in problem for problem in problems), problems


# Crashes and failing disks.


@pytest.mark.parametrize(
    ("defect", "scenario", "cut_ends"),
    [
        (defective_crash_server.fs_publishes_before_it_writes, FS, True),
        (defective_crash_server.fs_takes_a_short_write_for_a_whole_one, FS, False),
        (defective_crash_server.nvme_takes_torn_batches_for_whole, NVME, True),
    ],
    ids=["published early", "short write", "torn batch"],
)
def test_a_write_that_is_not_what_it_seems_is_found_by_cutting_writes(
    tmp_path: Path, defect: Callable[[], None], scenario: CrashScenario, cut_ends: bool
) -> None:
    with CrashCases(tmp_path / "crash", main=defect) as cases:
        tried = [Case(scenario, cut=cut, cut_ends=cut_ends) for cut in range(WRITES_TRIED)]
        assert_found(problems_of(cases, tried), "answered and are damaged")


def problems_of(cases: CrashCases, tried: Sequence[Case]) -> Iterator[list[str]]:
    """Run cases, a few at a time, and yield their problems."""
    for start in range(0, len(tried), CASES_A_ROUND):
        outcomes = cases.run(tried[start : start + CASES_A_ROUND])
        yield [problem for outcome in outcomes for problem in outcome.problems]


def test_a_segment_over_the_capacity_is_found_by_a_crash(tmp_path: Path) -> None:
    with CrashCases(tmp_path / "crash", main=defective_crash_server.nvme_makes_a_segment_too_many) as cases:
        # How far reclaiming has come when the writer ends differs from run to run, so it goes on with earlier writes.
        cuts = range(cases.count_writes(NVME) - 1, 0, -1)[:WRITES_TRIED]
        tried = [Case(NVME, cut=cut, cut_ends=True) for cut in cuts]
        assert_found(problems_of(cases, tried), "when the writer ended", "at the end")


@pytest.mark.parametrize(
    ("defect", "role", "text"),
    [
        (
            defective_crash_server.nvme_does_not_flush_its_marker,
            "main",
            "FormatError",
        ),  # it is cut off, and shuts its owner out for good
        (defective_crash_server.nvme_does_not_flush_a_reset, "nvme-0", "of version 0 where only {1} may be"),
    ],
    ids=["marker", "reset"],
)
def test_a_flush_that_is_left_out_is_found_by_a_loss_of_power(
    tmp_path: Path, defect: Callable[[], None], role: str, text: str
) -> None:
    scenario = dataclasses.replace(NVME, device=True)
    with CrashCases(tmp_path / "power", image=True, main=defect) as cases:
        calls = [call for call in cases.record(scenario, "changes") if call.role == role]
        tried = [Case(scenario, fault=Fault.kill(call), power=power) for call in calls for power in PowerLoss]
        assert_found(problems_of(cases, tried), text)


@pytest.mark.parametrize(
    ("before", "offset", "text"),
    [
        (0, 4096, "a batch is written before the header is flushed"),
        (4096, 8192, "a summary is written before the batch is flushed"),
    ],
    ids=["header", "summary"],
)
def test_a_flush_of_a_segment_that_is_left_out_is_found_by_the_order_of_its_writes(
    tmp_path: Path, before: int, offset: int, text: str
) -> None:
    # ext4 brings what a process wrote to the device in order nearly always, so a loss of power shows neither.
    page = memoryview(bytes(4096))
    for flushes in (True, False):
        disk = FlushOrder()
        with (tmp_path / "segment").open("wb") as file:
            file.truncate(3 * len(page))
            disk.pwritev(file.fileno(), [page], before)
            if flushes:
                disk.datasync(file.fileno())
            disk.pwritev(file.fileno(), [page], offset)
        assert [text in problem for problem in disk.problems] == ([] if flushes else [True])


def test_rows_without_memory_that_are_handed_out_are_found_by_refused_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHUNK_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(allocation, name, ServerSubject.CHUNK_ROWS * 4096)
    monkeypatch.setattr(HostRegion, "ready_rows", property(lambda region: region.num_blocks))
    subject = ServerSubject(tmp_path)
    with closing(subject):
        with Shortage(Resource.PAGES, 2, math.inf):
            subject.open()
        with pytest.raises(AssertionError, match="a row without memory"):
            subject.works()
