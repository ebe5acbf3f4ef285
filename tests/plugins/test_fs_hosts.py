"""What several hosts, users and years do to a shared directory: clocks that differ, strange entries, files cut off."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.entries import rig_of
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv_fs import keeper, posix
from tiered_kv_fs.ledger import Ledger
from tiered_kv_fs.threads import DaemonThreads

BLOCK_BYTES = 4096
DIGEST = bytes(range(16))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def rig(path: Path, monkeypatch: pytest.MonkeyPatch, patient_fs_shutdown: None) -> Iterator[TierRig]:
    monkeypatch.setattr("tiered_kv_fs.tier._ROOM_TIMEOUT_MAX_S", 60.0)  # or a busy machine makes stores find no room
    entry = {"type": "fs", "path": str(path), "capacity": 4 << 20, "threads": 4, "job_timeout": "120s"}
    rig = rig_of(entry, block_bytes=BLOCK_BYTES, num_blocks=512, namespace=DIGEST)
    yield rig
    rig.close()


def fill(rig: TierRig) -> None:
    """Store more than fits, so that the directory is counted and blocks are evicted."""
    for number in range(20):
        assert rig.store(make_keys(64, f"batch-{number}")).success
    assert rig.tier.stats()["evicted_files"] > 0


def test_an_owner_s_file_that_somebody_cuts_off_does_not_end_the_process(rig: TierRig, path: Path) -> None:
    keys = make_keys(4)
    rig.store(keys)
    for entry in (path / "owners").iterdir():
        os.truncate(entry, 0)
    assert rig.tier.reset_cache()
    assert rig.load(keys) == set()
    assert rig.store(keys).success
    rig.reopen()
    assert rig.load(keys) == set(keys)


def test_a_reset_does_not_wait_for_a_file_system_that_hangs(rig: TierRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store(make_keys(1))
    hangs, let_go = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def pwrite_late(*arguments: object) -> int:
        hangs.set()
        assert let_go.wait(60.0)
        return pwrite(*arguments)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(os, "pwrite", pwrite_late)
    began_s = time.monotonic()
    assert rig.tier.reset_cache()
    assert rig.tier.reset_cache()
    assert time.monotonic() - began_s < 30.0
    assert hangs.wait(60.0)
    let_go.set()
    rig.reopen()
    assert rig.load(make_keys(1)) == set()


@pytest.mark.parametrize("place", ["lost+found", "backup/deep"])
def test_a_foreign_directory_that_may_not_be_read_does_not_keep_the_tier_from_storing(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    locked = path / place
    locked.mkdir(parents=True)
    scandir = os.scandir

    def scandir_as_a_user(directory: str | int) -> object:
        if directory == str(locked):
            raise PermissionError(errno.EACCES, "Permission denied", directory)
        return scandir(directory)

    monkeypatch.setattr(os, "scandir", scandir_as_a_user)
    fill(rig)


def test_entries_named_like_ours_that_are_none_are_foreign(rig: TierRig, path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ("e" * 16) / "00").mkdir(parents=True)
    rig.store(make_keys(1))
    (path / ("a" * 32)).write_text("the md5 of something")
    (path / ("b" * 32)).symlink_to(elsewhere)
    (path / DIGEST.hex() / ("c" * 16)).write_text("a file")
    (path / DIGEST.hex() / ("d" * 16)).symlink_to(elsewhere / ("e" * 16))
    fill(rig)
    assert (elsewhere / ("e" * 16) / "00").is_dir(), "links are not followed"
    assert rig.tier.stats().get("failed_not_a_file", 0) == 0


def test_a_host_whose_clock_is_wrong_does_not_count_again_and_again(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = 0
    tick = keeper.Keeper._tick

    def counted(self: keeper.Keeper) -> str:
        nonlocal ticks
        answer = tick(self)
        ticks += 1
        return answer

    monkeypatch.setattr(keeper, "_TICK_S", 0.01)
    monkeypatch.setattr(keeper.Keeper, "_tick", counted)
    rig.store(make_keys(1))
    rig.reopen()
    ledger = Ledger(str(path / "ledger"), 60.0)
    for number in range(5):  # another host, an hour ahead, counts now and then
        with ledger.locked() as state:
            state.counted_at_s = time.time() + 3600 + number
        begun = ticks
        wait_until(lambda: ticks >= begun + 4)  # noqa: B023  called at once
    assert rig.tier.stats()["sweeps"] <= 1


def test_a_count_that_is_old_is_made_anew_whatever_the_clocks_say(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_TICK_S", 0.01)
    rig.store(make_keys(1))
    rig.tier.shutdown()
    with Ledger(str(path / "ledger"), 60.0).locked() as state:
        state.counted_at_s = time.time() - 3600
    rig.reopen()
    wait_until(lambda: rig.tier.stats()["sweeps"] >= 1)


def test_an_owner_s_file_that_another_host_removed_is_made_anew(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, calls on the open file then fail with ESTALE."""
    rig.store(make_keys(1))
    (lost,) = (path / "owners").iterdir()
    number = lost.stat().st_ino
    fstat = os.fstat

    def fstat_on_nfs(fd: int) -> os.stat_result:
        status = fstat(fd)
        if status.st_ino == number and status.st_nlink == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return status

    monkeypatch.setattr(os, "fstat", fstat_on_nfs)
    lost.unlink()
    wait_until(lambda: rig.store(make_keys(64, f"batch-{time.monotonic()}")).success and _owners(path))
    assert rig.tier.stats().get("failed_stale", 0) == 0


def _owners(path: Path) -> list[str]:
    return os.listdir(path / "owners")


def test_a_lock_whose_file_became_stale_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0
    fstat = os.fstat

    def stale_once(fd: int) -> os.stat_result:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", stale_once)
    with posix.locked(str(tmp_path / "lock"), 5.0):
        assert tries > 1


def test_where_no_more_threads_can_be_started_calls_are_made_by_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = DaemonThreads("few", threads_max=4, queue_max=8)
    start = threading.Thread.start
    allowed = 1

    def start_some(thread: threading.Thread) -> None:
        nonlocal allowed
        if not allowed:
            raise RuntimeError("can't start new thread")
        allowed -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    calls = [threads.submit(pow, number, 2) for number in range(6)]
    assert [call.result(60.0) for call in calls] == [0, 1, 4, 9, 16, 25]
    threads.shutdown()
    assert threads.join(time.monotonic() + 60.0) == 0
    with pytest.raises(TierUnavailableError, match="no thread"):
        DaemonThreads("none", threads_max=4, queue_max=8).submit(pow, 2, 2)
