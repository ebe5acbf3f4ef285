"""A disk without a free byte is the normal case of a cache: it opens, stores into what it has, evicts, and is purged.

`test_nvme_full_disk.py FOLDER` is a program that runs beside a mounted btrfs.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.plugins.conftest import DIGEST
from tests.support.disk_use import flush_file_system
from tests.support.disks import FaultyDisk
from tests.support.mounts import command_on, missing_for
from tiered_kv import open_stack
from tiered_kv.system.file_systems import Mount
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.administration import Purged
from tiered_kv_nvme.administration import NvmeAdministration
from tiered_kv_nvme.index import slot_of
from tiered_kv_nvme.settings import NvmeSettings

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench

SMALL_FILES = ("lock", "epoch", "tiered-kv-nvme.json")


class FullDisk(FaultyDisk):
    """Refuses segments, and with `patch` also small files, as a full disk or a quota does."""

    def __init__(self, code: int, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.on_allocate = self._refuse
        self._code = code
        self._open, self._pwrite = os.open, os.pwrite
        patch.setattr(os, "open", self._open_existing)
        patch.setattr(os, "pwrite", self._refuse)
        patch.setattr(os, "fsync", self._refuse)
        patch.setattr("tiered_kv_nvme.epoch.Disk.fallocate", self._refuse)

    def _refuse(self, *_: object) -> int:
        raise OSError(self._code, os.strerror(self._code))

    def _open_existing(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        try:
            return self._open(path, flags & ~(os.O_CREAT | os.O_EXCL), mode, dir_fd=dir_fd)
        except FileNotFoundError:
            return self._refuse() if flags & os.O_CREAT else self._open(path, flags, mode, dir_fd=dir_fd)


def purged(bench: StoreBench) -> Purged:
    settings = NvmeSettings(name="nvme", path=str(bench.path), capacity=bench.capacity_bytes)
    return NvmeAdministration(settings).purge(DIGEST.hex(), time.monotonic() + 60.0)


@pytest.mark.one_quick(3)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("missing", [(), *((name,) for name in SMALL_FILES), SMALL_FILES])
def test_a_full_disk_opens_stores_evicts_and_is_purged(
    bench: StoreBench, missing: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a small file is missing, and cannot be made."""
    store = bench.open_ready()
    bench.fill(store)
    bench.wait_until_ready(store)
    newest = bench.batch(bench.BATCHES - 1)
    store.close()
    for name in missing:
        (bench.path / name).unlink()
    with monkeypatch.context() as patch:
        store = bench.open(FullDisk(code, patch))
        assert store.describe()["direct_io"] == "yes"
        assert bench.get(store, newest) == (set() if "epoch" in missing else set(newest))
        bench.fill(store)
        assert bench.get(store, newest) == set(newest)
        store.close()
        names = len(bench.segments)
        freed = purged(bench)
        assert (names > 1, freed.left, bench.segments) == (True, (), [])
    store = bench.open()
    assert bench.put(store, newest).successful_keys is None


class LateListings:
    """os.listdir of a descriptor as on btrfs: it shows what was there when it was opened, or last read to its end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._known: dict[int, list[str]] = {}
        self._open, self._listdir = os.open, os.listdir
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "listdir", self.listdir)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:  # Any: as of os.open
        fd = self._open(path, flags, mode, dir_fd=dir_fd)
        self._known.pop(fd, None)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._known[fd] = self._listdir(fd)
        return fd

    def listdir(self, path: Any = ".") -> list[str]:
        names = self._listdir(path)
        if path not in self._known:
            return names
        known, self._known[path] = self._known[path], names
        return [name for name in names if name in known]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_directory_that_is_new_on_a_full_disk_fails_stores_until_there_is_space(
    bench: StoreBench, is_late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if is_late:
        LateListings(monkeypatch)
    for each in ("_GROW_RETRY_S", "_WATCH_S"):
        monkeypatch.setattr(f"tiered_kv_nvme.reclaimer.{each}", 0.01)
    bench.path.mkdir()
    keys = make_keys(5)
    with monkeypatch.context() as patch:
        disk = FullDisk(errno.ENOSPC, patch)
        store = bench.open(disk, room_timeout_s=600.0)
        assert bench.put(store, keys).reason == "no_space"
        assert "a segment of 256KiB was refused" in str(store.describe()["warning"])
        assert caplog.text.count("the disk has no space for another segment; free it") == 1
    assert "has space for segments again" not in caplog.text
    disk.on_allocate = lambda: None
    bench.wait_until(lambda: bench.put(store, keys).successful_keys is None)
    bench.wait_until(lambda: caplog.text.count("the disk has space for segments again, after ") == 1)
    bench.wait_until(lambda: all((bench.path / name).exists() for name in SMALL_FILES))
    store.close()
    assert "is not empty and not a directory of this tier" not in caplog.text
    assert bench.get(bench.open(), keys) == set(keys)


class Stuck:
    """os.unlink that refuses one file."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch, code: int = errno.EPERM) -> None:
        self._name, self._code, self._unlink = name, code, os.unlink
        patch.setattr(os, "unlink", self)

    def __call__(self, path: Any, *, dir_fd: int | None = None) -> None:  # Any: as of os.unlink
        if str(path).endswith(self._name):
            raise OSError(self._code, os.strerror(self._code))
        self._unlink(path, dir_fd=dir_fd)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EBUSY])
def test_a_file_that_cannot_be_deleted_is_passed_over_by_a_purge(
    bench: StoreBench, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.open_ready()
    bench.fill(store, range(9))
    store.close()
    first = bench.segments[0]
    with monkeypatch.context() as patch:
        Stuck(first.name, patch, code)
        freed = purged(bench)
    assert bench.segments == [first]
    assert freed.left == (f"{first} cannot be deleted: {os.strerror(code)}",)
    store = bench.open()
    assert store.describe()["blocks_found"] == 0


@pytest.mark.parametrize("code", [errno.EPERM, errno.EBUSY])
def test_a_file_that_cannot_be_deleted_is_passed_over_while_space_is_reclaimed(
    bench: StoreBench, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One segment is bad: it takes no header, and its file cannot be deleted."""
    store = bench.open_ready()
    bench.fill(store)
    bench.wait_until_ready(store)
    victim = next(segment for segment in store.pool.segments.values() if segment.state.value == "sealed")
    with monkeypatch.context() as patch:
        Stuck(store._directory.segment_name(victim.slot), patch, code)
        victim.damaged = True  # as after a read that failed
        bench.fill(store, range(100, 200))
        bench.wait_until(lambda: store.pool.segments.get(victim.slot) is not victim)
        assert len([text for text in caplog.messages if "deleting a segment file failed" in text]) == 1
        store.close()


def test_an_immutable_segment_is_passed_over_at_the_opening(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.open_ready()
    bench.fill(store, range(9))
    store.close()
    first, system_open = bench.segments[0].name, os.open

    def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == first:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return system_open(path, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        store = bench.open()
        bench.fill(store)
        assert len([text for text in caplog.messages if "opening a segment file failed" in text]) == 1
        assert bench.occupied_bytes() <= bench.capacity_bytes
        store.close()


def test_files_that_the_file_system_copies_on_write_are_replaced_and_not_filled_again(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses the attribute here, since this file system does not copy."""
    monkeypatch.setattr("tiered_kv_nvme.directory.mount_of", lambda fd: Mount("/", "disk", "btrfs", frozenset()))
    store = bench.open_ready()
    bench.fill(store)
    bench.wait_until_ready(store)
    assert "segments, which are replaced when they are reclaimed" in str(store.describe()["copy_on_write"])
    assert store.stats()["deleted_segments_total"] == store.stats()["reclaimed_segments_total"] > 0
    assert bench.occupied_bytes() <= bench.capacity_bytes
    store.close()
    with ExitStack() as files:
        before = [files.enter_context(path.open("rb")) for path in bench.segments]
        filled = [os.fstat(file.fileno()).st_mtime_ns for file in before]
        store = bench.open_ready()
        assert store.stats()["discarded_segments_total"] == 2  # the free ones
        keys = make_keys(5)
        assert bench.put(store, keys).successful_keys is None
        assert bench.get(store, keys) == set(keys)
        place = bench.path / store._directory.segment_name(slot_of(store.pool.index.places.get(keys[0])))
        assert place.stat().st_mtime_ns > max(filled)
        store.close()
        assert [os.fstat(file.fileno()).st_mtime_ns for file in before] == filled


def test_on_a_file_system_that_copies_what_can_be_exempt_is_reused_in_place(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv_nvme.directory.mount_of", lambda fd: Mount("/", "disk", "btrfs", frozenset()))
    exempt: list[int] = []
    monkeypatch.setattr("tiered_kv_nvme.directory.write_in_place", exempt.append)
    monkeypatch.setattr("tiered_kv_nvme.directory.is_written_in_place", lambda fd: bool(exempt))
    store = bench.open_ready()
    bench.fill(store)
    assert store.stats()["reclaimed_segments_total"] > 0
    assert store.stats()["deleted_segments_total"] == 0
    assert "copy_on_write" not in store.describe()


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "compress=zstd"])
def test_the_capacity_is_what_btrfs_loses(options: str, tmp_path: Path) -> None:
    if missing := missing_for("btrfs"):
        pytest.skip(missing)
    command = command_on("btrfs", options, tmp_path, [sys.executable, __file__, str(tmp_path)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["lost_mib"] <= told["capacity_mib"] + 8
    assert told["not_stored"] == 0
    assert told["stored_when_full"] > 0
    assert told["left_mib"] < 8


def main() -> None:
    folder = Path(sys.argv[1])
    mount, capacity_mib = folder / "mount", 256

    def used_mib() -> int:
        flush_file_system(mount)
        status = os.statvfs(mount)
        return (status.f_blocks - status.f_bfree) * status.f_frsize >> 20

    empty_mib = used_mib()
    entry = {"type": "nvme", "path": str(mount / "kv"), "capacity": capacity_mib << 20, "required_mount": str(mount)}
    stack = {
        "namespace": {"model": "m"},
        "block": {"bytes": 65536},
        "primary": {"capacity": 32 << 20},
        "secondary": [entry],
    }
    block, missed, lost_mib, stored = np.ones((100, 65536), np.uint8), 0, 0, 0
    for turn in range(3):
        with open_stack(stack) as opened:
            for first in range(turn * 8000, turn * 8000 + 8000, 100):
                opened.put([number.to_bytes(8, "big") for number in range(first, first + 100)], block, timeout=60)
                opened.flush(60)
            missed += int(opened.counters()["nvme"]["tier"]["no_space_errors_total"])
        lost_mib = max(lost_mib, used_mib() - empty_mib)
    for size in (1 << 20, 4096):
        with suppress(OSError), (mount / f"filler{size}").open("wb", buffering=0) as filler:
            while True:
                filler.write(os.urandom(size))
    with open_stack(stack) as opened:
        keys = [number.to_bytes(8, "big") for number in range(90000, 90100)]
        opened.put(keys, block, timeout=60)
        opened.flush(60)
        stored = int(opened.counters()["nvme"]["tier"]["stored_batches_total"])
    subprocess.run([sys.executable, "-m", "tiered_kv", "purge", "--yes", str(_yaml(folder, stack))], check=True)
    for filler_path in mount.glob("filler*"):
        filler_path.unlink()
    told = {
        "capacity_mib": capacity_mib,
        "lost_mib": lost_mib,
        "not_stored": missed,
        "stored_when_full": stored,
        "left_mib": used_mib() - empty_mib,
    }
    print(json.dumps(told))


def _yaml(folder: Path, stack: dict[str, Any]) -> Path:
    path = folder / "stack.yaml"
    path.write_text(json.dumps(stack))  # which is YAML, too
    return path


if __name__ == "__main__":
    main()
