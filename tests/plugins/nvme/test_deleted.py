"""Somebody deletes an open directory, or files in it: the tier makes them again, and keeps its lock and its limit."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tiered_kv.errors import TierBusyError
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.directory import SegmentDirectory

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench
    from tiered_kv_nvme.store import SegmentStore

SMALL_FILES = ("lock", "epoch", "tiered-kv-nvme.json")


@pytest.fixture(autouse=True)
def _watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv_nvme.reclaimer._WATCH_S", 0.02)
    monkeypatch.setattr("tiered_kv_nvme.reclaimer._WATCH_PAUSE_S", 0.02)


def open_bytes(directory: Path) -> int:
    """Return the space of the deleted segments that this process still has open."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        link = Path(f"/proc/self/fd/{name}")
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(link)
            if f"{directory}/segment" in target and "(deleted)" in target:
                total += link.stat().st_blocks * 512
    return total


def wait_until_lost(bench: StoreBench, store: SegmentStore, count: int) -> None:
    bench.wait_until(lambda: store.stats()["lost_segments_total"] >= count)
    bench.wait_until_ready(store)


def test_a_deleted_directory_is_made_again_and_grows_to_its_capacity(bench: StoreBench) -> None:
    store, keys = bench.open_ready(), make_keys(40, "before")
    assert bench.put(store, keys).successful_keys is None
    bench.wait_until_ready(store)
    segments = store.stats()["segments"]
    shutil.rmtree(bench.path)
    wait_until_lost(bench, store, segments)
    assert bench.get(store, keys) == set(keys), "an open file can be read without a name"
    for number in range(bench.BATCHES):
        bench.fill(store, [number])
        assert bench.occupied_bytes() + open_bytes(bench.path) <= bench.capacity_bytes
    bench.wait_until(lambda: open_bytes(bench.path) == 0)
    bench.wait_until(lambda: store.stats()["used_bytes"] > bench.capacity_bytes * 0.9)
    newest = bench.batch(bench.BATCHES - 1)
    store.close()
    assert bench.get(bench.open(), newest) == set(newest)


def test_a_directory_that_was_moved_away_is_made_again(bench: StoreBench, tmp_path: Path) -> None:
    store = bench.open_ready()
    bench.put(store, make_keys(5))
    bench.wait_until_ready(store)
    bench.path.rename(tmp_path / "elsewhere")
    moved = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    wait_until_lost(bench, store, 3)
    bench.fill(store, range(20))
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == moved
    store.close()
    newest = bench.batch(19)
    assert bench.get(bench.open(), newest) == set(newest)


def test_a_deleted_segment_costs_its_own_blocks_after_a_restart(bench: StoreBench) -> None:
    store = bench.open_ready()
    bench.fill(store, range(4))
    bench.wait_until_ready(store)
    bench.segments[0].unlink()
    wait_until_lost(bench, store, 1)
    assert all(bench.get(store, bench.batch(number)) == set(bench.batch(number)) for number in range(4))
    assert store.stats()["damaged_segments_total"] == 0
    bench.fill(store, range(4, 8))
    store.close()
    store = bench.open()
    found = sum(store.contains([key for number in range(8) for key in bench.batch(number)]))
    assert 8 * 40 - 63 <= found < 8 * 40


@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_small_file_is_made_again(bench: StoreBench, name: str) -> None:
    store, keys = bench.open_ready(), make_keys(40)
    bench.put(store, keys)
    store.reset()
    bench.put(store, keys[:20])
    (bench.path / name).unlink()
    bench.wait_until((bench.path / name).exists)
    with pytest.raises(TierBusyError):
        SegmentDirectory(str(bench.path), bench.identity)
    store.close()
    assert bench.get(bench.open(), keys) == set(keys[:20])


def test_a_directory_that_lost_its_small_files_while_nobody_had_it_open_opens(bench: StoreBench) -> None:
    store, keys = bench.open_ready(), make_keys(40)
    bench.put(store, keys)
    store.close()
    for name in ("lock", "tiered-kv-nvme.json"):
        (bench.path / name).unlink()
    assert bench.get(bench.open(), keys) == set(keys)


def test_the_one_who_makes_the_directory_again_owns_it(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv_nvme.reclaimer._WATCH_S", 3600.0)
    first, keys, more = bench.open_ready(), make_keys(40), make_keys(20, "more")
    bench.put(first, keys)
    bench.wait_until_ready(first)
    shutil.rmtree(bench.path)
    second = bench.open_ready()
    with pytest.raises(TierBusyError, match="is in use by another tier of this process"):
        first._remake()
    assert bench.get(first, keys) == set(keys)
    assert bench.put(second, more).successful_keys is None
    first.close()
    with pytest.raises(TierBusyError):
        bench.open()
    second.close()
    assert bench.get(bench.open(), more) == set(more)


def test_a_lock_file_that_is_deleted_lets_nobody_else_in(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv_nvme.reclaimer._WATCH_S", 3600.0)
    monkeypatch.setattr("tiered_kv_nvme.directory._CLEANER_S", 0.0)
    bench.open_ready()
    (bench.path / "lock").unlink()
    with pytest.raises(TierBusyError, match="is in use by another tier of this process"):
        bench.open()


def test_a_directory_is_not_made_on_the_file_system_below_a_mount_that_has_gone(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv_nvme.reclaimer._WATCH_S", 3600.0)
    store = bench.open_ready()
    shutil.rmtree(bench.path)
    device = os.stat(bench.path.parent).st_dev
    stat = os.stat

    def of_another(path: Any, **options: Any) -> os.stat_result:  # Any: as of os.stat
        status = stat(path, **options)
        is_above = path == str(bench.path.parent)
        return os.stat_result((*status[:2], device + 1, *status[3:])) if is_above else status

    monkeypatch.setattr(os, "stat", of_another)
    with pytest.raises(OSError, match="another file system is mounted there now"):
        store._remake()
    assert not bench.path.exists()


HOLD = """
import os, subprocess, sys, time
from tiered_kv_nvme.directory import SegmentDirectory, Identity
SegmentDirectory(sys.argv[1], Identity(bytes(range(16)), {}, 4096))
if sys.argv[2] == "child" and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["process", "child"])
def test_the_error_names_the_process_that_holds_the_lock_whatever_its_file_says(bench: StoreBench, who: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(bench.path), who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if who == "child":
            owner.wait(60.0)
        (bench.path / "lock").write_text("1\n")
        try:
            with pytest.raises(TierBusyError, match=rf"is in use by process {pid} \(python[\w.]*\); stop it"):
                SegmentDirectory(str(bench.path), bench.identity)
        finally:
            assert owner.stdin is not None
            owner.stdin.close()


def test_an_owner_in_another_container_is_not_taken_for_a_process_of_this_one(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open()
    monkeypatch.setattr("tiered_kv_nvme.directory._holds", lambda pid, status: False)
    wanted = rf"in another container or on another host; its owner wrote 'process {os.getpid()} on [\w.-]+' into lock"
    with pytest.raises(TierBusyError, match=wanted):
        bench.open()


def test_an_owner_is_busy_where_a_jail_has_no_proc(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open()
    listdir = os.listdir

    def without_proc(path: Any = ".") -> list[Any]:  # Any: as of `os.listdir`
        if path == "/proc":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", without_proc)
    with pytest.raises(TierBusyError, match="is in use by a process that this one cannot see"):
        bench.open()
