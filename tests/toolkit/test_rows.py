"""A job that names rows outside of the memory is refused: nothing is read, written or deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.base import ReqContext
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.tiering.base import JobMetadata, JobResult
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.tier import FsTier
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier

NUM_BLOCKS = 16


def opening_memory(path: Path) -> OpenTier:
    return lambda spec, view: MemoryTier(spec, view, "memory", MemorySettings.model_validate({"capacity": "1MiB"}))


def opening_fs(path: Path) -> OpenTier:
    settings = FsSettings.model_validate({"path": str(path / "kv"), "capacity": "1MiB"})
    return lambda spec, view: FsTier(spec, view, "fs", settings)


@pytest.fixture(params=[opening_memory, opening_fs], ids=["memory", "fs"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierRig]:
    opening: Callable[[Path], OpenTier] = request.param
    rig = TierRig(opening(tmp_path), num_blocks=NUM_BLOCKS, block_bytes=4096, wait_s=20.0)
    yield rig
    rig.close()


@pytest.mark.parametrize("rows", [(0, NUM_BLOCKS), (-1, 0), (2, 2), (0, 1, 2), (), ((0,), (1,))], ids=str)
def test_a_load_into_other_rows_is_refused_and_keeps_the_blocks(
    rig: TierRig, rows: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(2)
    assert rig.store(keys).success
    before = rig._region.array.copy()
    for number in range(2):
        result = submitted(rig, rows, number, is_promotion=True)
        assert not result.success
        assert result.reason == "no_row"
    assert np.array_equal(rig._region.array, before)
    assert rig.load(keys) == set(keys)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"0 to {NUM_BLOCKS - 1}" in errors[0].message


@pytest.mark.parametrize("rows", [(0, NUM_BLOCKS), (-1, 0), (0,)], ids=str)
def test_a_store_out_of_other_rows_stores_nothing(rig: TierRig, rows: tuple[int, ...]) -> None:
    result = submitted(rig, rows, 0, is_promotion=False)
    assert not result.success
    assert not result.successful_keys
    assert [rig.lookup(key) for key in make_keys(2)] == [False, False]
    assert rig.store(make_keys(2)).success


def submitted(rig: TierRig, rows: tuple[object, ...], number: int, *, is_promotion: bool) -> JobResult:
    """Return the result of a job of two blocks."""
    job = JobMetadata(1000 + number, make_keys(2), np.array(rows, np.int64), is_promotion, ReqContext("r"))
    (rig.tier.submit_load if is_promotion else rig.tier.submit_store)(job)
    results: list[JobResult] = []

    def is_reported() -> bool:
        results.extend(rig.tier.get_finished())
        return bool(results)

    wait_until(is_reported, rig.wait_s)
    return results[0]
