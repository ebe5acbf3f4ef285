"""The sizes that the nvme tier accepts."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.patient_nvme import patient_nvme
from tiered_kv.base import ReqContext
from tiered_kv.errors import ConfigError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import JobMetadata
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.sizing import Sizing
from tiered_kv_nvme.tier import NvmeTier

__all__ = ["patient_nvme"]

pytestmark = pytest.mark.usefixtures("patient_nvme")


def test_an_engine_that_passes_no_spec_is_served(tmp_path: Path) -> None:
    view = memoryview(mmap.mmap(-1, 16 * 4096)).cast("B", (16, 4096))
    settings = NvmeSettings(path=str(tmp_path / "kv"), capacity=64 << 20)
    tier = NvmeTier(None, view, "nvme", settings)
    assert tier.describe()["path"] == str(tmp_path / "kv")
    tier.shutdown()


@pytest.mark.parametrize(("codec", "has_many"), [("raw", True), ("zstd", False)])
def test_a_part_has_many_blocks_only_if_they_need_no_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, has_many: bool
) -> None:
    pytest.importorskip("zstandard")
    block_bytes = 1 << 20
    memory = mmap.mmap(-1, 16 * block_bytes)
    memory.write(np.random.default_rng(0).bytes(16 * block_bytes))  # which does not get shorter
    settings = NvmeSettings.model_validate({"path": str(tmp_path), "capacity": 64 << 20, "codec": codec})
    written: list[int] = []
    pwritev = Disk.pwritev

    def noted(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        written.append(sum(map(len, buffers)) // block_bytes)
        return pwritev(disk, fd, buffers, offset)

    monkeypatch.setattr(Disk, "pwritev", noted)
    tier = NvmeTier(None, memoryview(memory).cast("B", (16, block_bytes)), "nvme", settings)
    try:
        tier.submit_store(JobMetadata(1, make_keys(16), np.arange(16), False, ReqContext()))
        wait_until(lambda: [result.success for result in tier.get_finished()] == [True])
    finally:
        tier.shutdown()
    assert sum(written) == 16
    assert (max(written) > 2) is has_many, "a segment ends after seven"


@pytest.mark.parametrize("block_bytes", [1, 512, 4096, 65536, 1 << 20, 2 << 20, 24 << 20])
def test_the_least_capacity_that_an_error_names_is_enough(block_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^capacity: .* it takes at least ") as caught:
        Sizing.of(1, block_bytes)
    least = str(caught.value).rpartition(" ")[2]
    settings = NvmeSettings.model_validate({"path": "kv", "capacity": least})
    assert Sizing.of(settings.capacity, block_bytes).segments_max >= 4
    with pytest.raises(ConfigError):
        Sizing.of(settings.capacity - 1, block_bytes)


@pytest.mark.parametrize("capacity_gib", [0.0625, 0.25, 1, 4, 100, 4000])
@pytest.mark.parametrize("block_bytes", [4096, 65536, 1 << 20])
def test_segments_are_several_and_of_a_sensible_size(capacity_gib: float, block_bytes: int) -> None:
    sizing = Sizing.of(int(capacity_gib * 2**30), block_bytes)
    assert sizing.segments_max >= 7
    assert sizing.segment_bytes % 4096 == 0
    assert sizing.segment_bytes <= 256 << 20 or sizing.segments_max >= 500
    assert sizing.segments_max <= 512
    assert sizing.segments_max * sizing.segment_bytes >= 0.85 * sizing.capacity_bytes


@pytest.mark.parametrize("segment_bytes", [0, 4096, 1 << 20, (2 << 20) + 1])
def test_a_segment_that_holds_no_block_is_refused(segment_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^segment: .* at least "):
        Sizing.of(1 << 30, 1 << 20, segment_bytes)


def test_segments_that_would_be_too_many_open_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^segment: .* more than 512 open files: it takes at least 200MiB"):
        Sizing.of(100 << 30, 4096, 8 << 20)
