"""Locks of directories on mounts that answer otherwise: EACCES for a held lock (SMB), two holders of one lock (NFS)."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.plugins.conftest import WAIT_S, StoreBench
from tests.support.disk_use import fs_ledger, occupied_bytes
from tests.support.entries import OpenRig
from tiered_kv.errors import TierBusyError, TierUnavailableError
from tiered_kv.metrics.counters import count_of
from tiered_kv.system.file_systems import Mount
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv_fs import locks
from tiered_kv_fs.ledger import DirectoryLedger
from tiered_kv_fs.locks import LostLockError, locked

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 8 << 20

flock = fcntl.flock


@pytest.fixture
def held_is_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer EACCES for a held lock."""

    def ask(fd: int, operation: int) -> None:
        try:
            flock(fd, operation)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None

    monkeypatch.setattr(fcntl, "flock", ask)


@pytest.mark.usefixtures("held_is_no_permission")
def test_an_opening_and_a_store_wait_for_a_lock_whatever_the_file_system_calls_it(
    open_rig: OpenRig, path: Path
) -> None:
    rig = open_rig()
    assert_waits(path, open_rig)
    assert_waits(path, lambda: rig.store(make_keys(4)).success)


def assert_waits(path: Path, work: Callable[[], object]) -> None:
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    with locked(str(path / "lock"), 60.0):
        thread.start()
        thread.join(0.1)
        assert not done
    thread.join()
    assert done
    assert done[0]


@pytest.mark.parametrize("answers", [errno.EAGAIN, errno.EACCES])
def test_a_waiter_leaves_the_lock_s_file_open_since_to_open_it_slows_the_holder_on_smb(
    path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """There, each opening by another host has the holder's host give up what it keeps in memory: a call or two more."""
    asked, opened = list[int](), list[str]()
    real_open = os.open

    def ask(fd: int, operation: int) -> None:
        try:
            flock(fd, operation)
        except BlockingIOError:
            asked.append(fd)
            raise OSError(answers, os.strerror(answers)) from None

    def count(name: str, *arguments: int, **named: int) -> int:
        opened.append(name)
        return real_open(name, *arguments, **named)

    monkeypatch.setattr(fcntl, "flock", ask)
    path.mkdir()
    lock = str(path / "lock")
    with ThreadPoolExecutor(1) as pool:
        with locked(lock, WAIT_S):
            monkeypatch.setattr(os, "open", count)
            waiter = pool.submit(take_once, lock)
            wait_until(lambda: len(asked) > 4)
        waiter.result()
    assert opened.count(lock) == 1
    assert len(set(asked)) == 1


def take_once(path: str) -> None:
    with locked(path, WAIT_S):
        pass


@pytest.mark.usefixtures("held_is_no_permission")
def test_nvme_says_who_has_the_directory_whatever_the_file_system_calls_it(bench: StoreBench) -> None:
    bench.open()
    with pytest.raises(TierBusyError, match="in use by another tier of this process"):
        bench.open()


def lost(name: str, code: int, times: float) -> Callable[..., object]:
    """Return a call of `os` or `fcntl` that fails on the ledger's lock so many times."""
    call: Callable[..., object] = flock if name == "flock" else getattr(os, name)
    left = [times]

    def fail(fd: int, *arguments: object) -> object:
        if isinstance(fd, int) and left[0] > 0 and os.readlink(f"/proc/self/fd/{fd}").endswith("/kv/lock"):
            left[0] -= 1
            if name == "close":
                call(fd)
            raise OSError(code, os.strerror(code))
        return call(fd, *arguments)

    return fail


@pytest.mark.parametrize(("name", "code"), [("flock", errno.EIO), ("utime", errno.ESTALE), ("fstat", errno.EIO)])
def test_a_lock_s_file_that_was_lost_is_opened_anew_and_an_error_that_stays_is_named(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    open_rig().close()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl if name == "flock" else os, name, lost(name, code, 1))
        assert open_rig().store(make_keys(1)).success
    with monkeypatch.context() as patch:
        patch.setattr(fcntl if name == "flock" else os, name, lost(name, code, float("inf")))
        with pytest.raises(TierUnavailableError, match=rf"{errno.errorcode[code]}|{os.strerror(code)}.*/kv/lock"):
            open_rig()


def test_a_late_error_of_a_lock_s_file_fails_nothing(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "close", lost("close", errno.EIO, float("inf")))
    rig = open_rig()
    assert rig.store(make_keys(16)).success
    assert not rig.tier.stats()["failed_calls_total"]


@pytest.mark.one_quick(2)
@pytest.mark.parametrize("name", ["pwrite", "pread"])
def test_a_lock_whose_descriptor_fails_is_a_lost_one_of_which_a_tier_says_once_what_to_do(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    rig = open_rig()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, lost(name, errno.EIO, float("inf")))
        for number in range(20):
            assert rig.store(make_keys(16, f"batch-{number}")).success, "blocks are stored all the same"
    assert count_of(rig.tier.stats(), "failed_calls_total", "lock_lost") > 1
    (line,) = [text for text in caplog.messages if "nfs4_unique_id" in text]
    assert "name of its own" in line
    assert "nfs4_unique_id" in str(rig.tier.describe()["warning"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ESPIPE, errno.EPERM])
def test_a_lock_s_file_that_cannot_be_written_is_no_lost_lock(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "pwrite", lost("pwrite", code, float("inf")))
    rig = open_rig()
    assert rig.store(make_keys(16)).success
    assert not count_of(rig.tier.stats(), "failed_calls_total", "lock_lost")
    assert "warning" not in rig.tier.describe()


def test_what_another_holder_of_the_lock_wrote_is_not_written_over(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two hosts of one name, of which each gets the lock while the other one has it."""
    rig = open_rig()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(LostLockError, match="name of its own"):
        change_while(path, lambda: rig.store(make_keys(4)).success)
    assert fs_ledger(path)["total_bytes"] > 4 * BLOCK_BYTES


def change_while(path: Path, work: Callable[[], object]) -> None:
    with DirectoryLedger(str(path)).locked() as state:
        state.total_bytes = 0
        assert work()


def test_a_tier_whose_entry_in_the_ledger_was_written_over_has_the_directory_counted(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tiered_kv_fs.grants._TICK_S", 0.05)
    rig = open_rig()
    assert rig.store(make_keys(4)).success
    first = ledger_of(rig, path)
    fill(rig, 10)
    wait_until(lambda: ledger_of(rig, path) != first)
    surveys = rig.tier.stats()["surveys_total"]
    replaced = path / "replaced"
    replaced.write_bytes(first)
    replaced.rename(path / "ledger")
    wait_until(lambda: rig.tier.stats()["surveys_total"] > surveys)
    fill(rig, 20)
    assert occupied_bytes(path) <= CAPACITY_BYTES
    assert fs_ledger(path)["total_bytes"] >= occupied_bytes(path)
    assert len([text for text in caplog.messages if "nfs4_unique_id" in text]) == 1


def ledger_of(rig: TierRig, path: Path) -> bytes:
    with DirectoryLedger(str(path)).locked():
        return (path / "ledger").read_bytes()


def fill(rig: TierRig, batches: int) -> None:
    for number in range(batches):
        assert rig.store(make_keys(8, f"batch-{number}")).success


def test_tiers_whose_locks_do_not_exclude_store_and_keep_to_the_capacity_after_a_survey(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr("tiered_kv_fs.grants._TICK_S", 0.05)
    rigs, stored = [open_rig() for _ in range(2)], list[bool]()

    def work(at: int) -> None:
        for number in range(20):
            stored.append(rigs[at].store(make_keys(8, f"of {at}: {number}")).success)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(stored) > len(stored) // 2
    wait_until(lambda: occupied_bytes(path) <= CAPACITY_BYTES)


def test_nvme_says_where_two_hosts_may_take_its_lock(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount("/mnt", "server:/export", "nfs", frozenset({"rw", "vers=3", "nolock"}))
    monkeypatch.setattr("tiered_kv_nvme.directory.mount_of", lambda _: mount)
    assert "locks reach no other host, as /mnt is mounted with nolock" in str(bench.open().describe()["warning"])


def test_on_smb_nothing_is_written_into_a_lock_s_file_which_another_host_s_lock_would_forbid(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = Mount(str(path.parent), "//server/kv", "cifs", frozenset({"rw"}))
    monkeypatch.setattr(locks, "mount_of", lambda _: mount)
    monkeypatch.setattr(locks, "_kinds", {})
    assert open_rig().store(make_keys(16)).success
    assert (path / "lock").stat().st_size == 0
