"""Defects planted in the product on purpose: each must be found by the races that are there to find it.

The simulation's are in `tests/testing/test_simulation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

import tiered_kv_fs.blocks
import tiered_kv_memory.tier
import tiered_kv_nvme.reader
from tiered_kv.base import OffloadKey
from tiered_kv.testing.hindrance import Hindrance
from tiered_kv.testing.race_cases import race_damage, race_late_workers, race_loads_with_stores
from tiered_kv.testing.race_stacks import BLOCK_BYTES, stack_of
from tiered_kv.testing.races import Prompts, open_guarded, problems_at_rest
from tiered_kv.testing.racing_scheduler import RacingScheduler
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.cascade import Cascade
from tiered_kv.tiering.jobs import Job
from tiered_kv.tiering.lane import Lane
from tiered_kv.tiering.promotion import Promotions
from tiered_kv.toolkit.record import RecordStatus
from tiered_kv_memory.tier import MemoryTier
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.index import place_of
from tiered_kv_nvme.layout import Entry
from tiered_kv_nvme.pool import Reservation
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.tier import NvmeTier
from tiered_kv_nvme.writer import BatchWriter

pytestmark = [pytest.mark.trust("planted-defects"), pytest.mark.slow]

SECONDS = 6.0
SEED = 1


def late(entry: dict[str, object]) -> dict[str, object]:
    return stack_of({**entry, "job_timeout": 0.03, "breaker_failures": 1_000_000})


MEMORY: dict[str, object] = {"type": "memory", "capacity": 1 << 20}
MEMORY_PLACES: list[tuple[object, str]] = [
    (tiered_kv_memory.tier, "decode_record"),
    (tiered_kv_memory.tier, "encode_record"),
]


def test_a_load_s_blocks_released_before_its_worker_has_ended_are_found_by_late_workers() -> None:
    finish = Promotions.finish

    def release_at_once(promotions: Promotions, job: Job) -> None:
        for block in job.blocks:
            promotions._drop(block.key, block)
            promotions._primary.forget(block)
            promotions._primary.backend.free(block)

    def ignore_expired(promotions: Promotions, job: Job, result: JobResult) -> object:
        return [] if job.is_expired else finish(promotions, job, result)

    with (
        mock.patch.object(Promotions, "expire", release_at_once),
        mock.patch.object(Promotions, "finish", ignore_expired),
    ):
        problems, expired = race_late_workers(late(MEMORY), MEMORY_PLACES, seed=SEED, seconds=SECONDS)
    assert expired > 0
    assert any("after it had been released" in problem for problem in problems), problems


def test_a_store_s_blocks_released_before_its_worker_has_ended_are_found_by_late_workers() -> None:
    expire, finish = Lane.expire, Cascade.finish
    cascades: list[Cascade] = []
    make = Cascade.__init__

    def remember(cascade: Cascade, *arguments: object) -> None:
        make(cascade, *arguments)  # type: ignore[arg-type]  # passed on
        cascades.append(cascade)

    def release_at_once(lane: Lane, now_s: float) -> list[Job]:
        jobs = expire(lane, now_s)
        for job in jobs:
            if not job.is_promotion:
                cascades[-1]._primary.unpin(job.blocks)
        return jobs

    def ignore_expired(cascade: Cascade, job: Job) -> None:
        if not job.is_expired:
            finish(cascade, job)

    # A late store then keeps another block's bytes, with a checksum that fits them.
    with (
        mock.patch.object(Cascade, "__init__", remember),
        mock.patch.object(Lane, "expire", release_at_once),
        mock.patch.object(Cascade, "finish", ignore_expired),
    ):
        problems, expired = race_late_workers(late(MEMORY), MEMORY_PLACES, seed=SEED, seconds=SECONDS)
    assert expired > 0
    assert any("holds other bytes" in problem for problem in problems), problems


def test_an_index_entry_that_is_added_before_its_write_is_found_by_loads_amid_stores(tmp_path: Path) -> None:
    write = BatchWriter._write_batch

    def publish_first(
        writer: BatchWriter,
        reservation: Reservation,
        keys: Sequence[OffloadKey],
        payloads: Sequence[object],
        old_places: Sequence[int] | None,
    ) -> str:
        entries, _ = writer._lay_out(reservation, keys, payloads, gather=False)  # type: ignore[arg-type]  # passed on
        segment = reservation.segment
        with writer._pool.changed:
            writer._index.add(keys, place_of(segment.slot, len(segment.table)))
            segment.table.append(keys, entries)
        return write(writer, reservation, keys, payloads, old_places)  # type: ignore[arg-type]  # passed on

    def published_already(
        writer: BatchWriter, reservation: Reservation, entries: Sequence[Entry], *rest: object
    ) -> bool:
        with writer._pool.changed:
            return writer._pool.commit(reservation)

    settings = NvmeSettings(path=str(tmp_path / "nvme"), capacity=4 << 20, segment=256 << 10)
    with (
        mock.patch.object(BatchWriter, "_write_batch", publish_first),
        mock.patch.object(BatchWriter, "_publish", published_already),
        Hindrance(SEED, delay_max_s=0.005).before((Disk, "pwritev")),
    ):
        problems, _ = race_loads_with_stores(
            lambda spec, view: NvmeTier(spec, view, "nvme", settings),
            seed=SEED,
            seconds=SECONDS,
            block_bytes=BLOCK_BYTES,
        )
    assert any("could not be loaded" in problem for problem in problems), problems


def test_a_checksum_that_nvme_does_not_check_is_found_by_damage_amid_loads(tmp_path: Path) -> None:
    entry: dict[str, object] = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": 1 << 20, "segment": 1 << 17}

    class Unchecked(bytes):
        """A checksum that is equal to every other."""

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = bytes.__hash__

    with mock.patch.object(tiered_kv_nvme.reader, "checksum", return_value=Unchecked()):
        problems, _ = race_damage(stack_of(entry), tmp_path / "nvme", seed=SEED, seconds=SECONDS)
    assert any("holds other bytes" in problem for problem in problems), problems


def test_a_checksum_of_a_record_that_is_not_checked_is_found_by_damage_amid_loads(tmp_path: Path) -> None:
    entry: dict[str, object] = {"type": "fs", "path": str(tmp_path / "fs"), "capacity": 2 << 20}

    def unchecked(
        header: memoryview, payload: memoryview, key: OffloadKey, block: memoryview, *rest: object
    ) -> RecordStatus:
        if len(payload) != len(block):
            return RecordStatus.TRUNCATED
        if payload is not block:
            block[:] = payload
        return RecordStatus.OK

    with mock.patch.object(tiered_kv_fs.blocks, "decode_record", unchecked):
        problems, _ = race_damage(stack_of(entry), tmp_path / "fs", seed=SEED, seconds=SECONDS)
    assert any("holds other bytes" in problem for problem in problems), problems


def test_a_tier_that_forgets_nothing_at_a_reset_is_found_by_a_scheduler_that_resets() -> None:
    with mock.patch.object(MemoryTier, "reset_cache", return_value=True):
        stack, guard = open_guarded(stack_of(MEMORY))
        with stack:
            scheduler = RacingScheduler(stack.manager, stack.region, Prompts(BLOCK_BYTES), seed=SEED)
            race = scheduler.run(SECONDS, reset_every=100, until=lambda: bool(scheduler.race.problems))
            scheduler.finish()
            problems = [*race.problems, *problems_at_rest(stack.manager, guard)]
    assert any("holds other bytes" in problem for problem in problems), problems
