"""The directory of an nvme tier: one owner, one namespace, and foreign files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import FaultyDisk, full_after
from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.claimed import Identity
from tiered_kv_nvme.directory import Directory
from tiered_kv_nvme.files import SegmentFiles

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
