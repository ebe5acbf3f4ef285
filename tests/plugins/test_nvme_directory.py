"""The directory of an nvme tier: one owner, one namespace, foreign files, and the sizes that it accepts."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.disks import FaultyDisk, full_after
from tests.support.patient_nvme import patient_nvme
from tiered_kv.base import ReqContext
from tiered_kv.errors import ConfigError, FormatError, TierUnavailableError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import JobMetadata
from tiered_kv.toolkit.claimed import Identity
from tiered_kv_nvme.directory import Directory
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.files import SegmentFiles
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.sizing import Sizing
from tiered_kv_nvme.tier import NvmeTier

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.conftest import StoreBench


def test_a_second_process_is_refused_with_the_id_of_the_owner(bench: StoreBench) -> None:
    bench.open()
    program = (
        "import sys\n"
        "from tiered_kv_nvme.directory import Directory, Identity\n"
        "Directory(sys.argv[1], Identity(bytes(range(16)), {}, 4096), tier='second')\n"
    )
    command = [sys.executable, "-c", program, str(bench.path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert f"tier 'second' cannot be opened: {bench.path} is in use by process {os.getpid()}" in result.stderr


def test_an_error_shows_only_the_differences_of_namespaces(tmp_path: Path) -> None:
    def identity(tenant: str, rank: int) -> Identity:
        inner = {"model": "m", "tenant": tenant, "parallel": {"tensor": 2, "rank": rank}}
        return Identity(tenant.encode().ljust(16), {"namespace": inner, "format": 1}, 4096)

    Directory(str(tmp_path / "kv"), identity("default", 0)).close()
    with pytest.raises(FormatError) as caught:
        Directory(str(tmp_path / "kv"), identity("bob", 1))
    assert "(parallel.rank: 0 there, 1 here; tenant: 'default' there, 'bob' here)" in str(caught.value)


def test_foreign_files_are_left_alone_and_count_against_the_capacity(bench: StoreBench) -> None:
    bench.open().close()
    foreign = bench.path / "core.1234"
    foreign.write_bytes(bytes(2 << 20))
    other = bench.path / "segment-ffffffff-000000.kv"  # of another namespace
    other.write_bytes(bytes(4096))
    nested = bench.path / "backup"
    nested.mkdir()
    (nested / "old.kv").write_bytes(bytes(1 << 20))
    store = bench.open()
    assert store.describe()["foreign_files"] == 3
    bench.fill(store, range(15))
    assert store.stats()["reclaimed_segments_total"] > 0
    occupied = bench.occupied_bytes() + (nested / "old.kv").stat().st_blocks * 512
    assert occupied <= bench.capacity_bytes
    store.close()
    assert foreign.stat().st_size == 2 << 20
    assert (nested / "old.kv").exists()
    assert other.exists()


def test_a_capacity_beyond_the_free_space_of_the_disk_is_a_warning(bench: StoreBench) -> None:
    store = bench.open()
    described = store.describe()
    assert isinstance(described["free_bytes"], int)
    assert "warning" not in described
    store.close()
    bench.capacity_bytes, bench.segment_bytes = 1 << 60, None
    bench.path = bench.path.with_name("larger")
    disk = FaultyDisk()
    disk.on_allocate = full_after(0)
    described = bench.open(disk).describe()
    assert "of the capacity can be had" in str(described["warning"])


def test_segments_that_cannot_be_opened_are_not_deleted(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = bench.open()
    keys = make_keys(150)
    bench.put(store, keys)
    store.close()

    def too_many(files: SegmentFiles, slot: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFiles, "open", too_many)
        with pytest.raises(TierUnavailableError, match="cannot be used: Too many open files"):
            bench.open()
    assert bench.get(bench.open(), keys) == set(keys)


def test_temporary_files_of_a_crash_while_opening_are_removed(bench: StoreBench) -> None:
    bench.path.mkdir(mode=0o700)
    (bench.path / "lock").write_text("1\n")
    leftovers = [bench.path / name for name in ("probe.tmp", f".tiered-kv-nvme.json.{'0' * 16}.tmp")]
    for path in leftovers:
        path.write_bytes(b"{")
    bench.open()
    assert not any(path.exists() for path in leftovers)


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
