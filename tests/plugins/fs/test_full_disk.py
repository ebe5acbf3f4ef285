"""An fs directory on a full disk: old blocks give way to new ones, to small files and to a purge.

Full is here a limit of the test on the bytes or files below the directory, which statvfs does not show: as a quota.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disk_use import fs_blocks, fs_ledger
from tests.support.entries import OpenRig
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.settings import FsSettings

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
DIGEST = bytes(range(16))
OTHER = bytes(range(16, 32))
BLOCKS = 48


class SmallDisk:
    """Refuses writes below a directory, and new files, while more is there than when it was `fill`ed."""

    def __init__(self, path: Path, code: int, *, counts_files: bool) -> None:
        self._path = path
        self._code = code
        self._counts_files = counts_files
        self._limit: int | None = None
        self._open, self._pwritev, self._mkdir = os.open, os.pwritev, os.mkdir

    def fill(self) -> None:
        self._limit = self._used()

    def free(self) -> None:
        self._limit = None

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        inside = dir_fd is not None or str(path).startswith(str(self._path))
        if inside and self._counts_files and flags & os.O_CREAT and not os.path.lexists(path):
            self._refuse(1)
        return self._open(path, flags, mode, dir_fd=dir_fd)

    def pwritev(self, fd: int, parts: list[bytes], offset: int) -> int:
        if not self._counts_files and os.readlink(f"/proc/self/fd/{fd}").startswith(str(self._path)):
            self._refuse(sum(map(len, parts)))
        return self._pwritev(fd, parts, offset)

    def mkdir(self, path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if self._counts_files and str(path).startswith(str(self._path)):
            self._refuse(1)
        self._mkdir(path, mode, dir_fd=dir_fd)

    def _refuse(self, more: int) -> None:
        if self._limit is not None and self._used() + more > self._limit:
            raise OSError(self._code, os.strerror(self._code))

    def _used(self) -> int:
        used = 0
        for root, directories, names in os.walk(self._path):
            if self._counts_files:
                used += len(directories) + len(names)
                continue
            for name in names:
                try:
                    used += os.lstat(f"{root}/{name}").st_size
                except FileNotFoundError:
                    continue
        return used


KINDS = [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.ENOSPC, True)]


@pytest.fixture(params=KINDS, ids=["bytes", "quota", "inodes"])
def disk(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    code, counts_files = request.param
    disk = SmallDisk(path, code, counts_files=counts_files)
    for name in ("open", "pwritev", "mkdir"):
        monkeypatch.setattr(os, name, getattr(disk, name))
    return disk


def purge(path: Path, digest: bytes) -> tuple[int | None, tuple[str, ...]]:
    purged = FsAdministration(FsSettings(path=str(path), capacity=CAPACITY_BYTES)).purge(
        digest.hex(), time.monotonic() + 60
    )
    return purged.blocks, purged.left


@pytest.mark.one_quick(2)
def test_old_blocks_give_way_to_new_ones(open_rig: OpenRig, path: Path, disk: SmallDisk) -> None:
    rig = open_rig()
    old = make_keys(BLOCKS, "old")
    assert rig.store(old).success
    for block in fs_blocks(path):
        os.utime(block, (1, 1))
    disk.fill()
    for number in range(3):
        new = make_keys(4, f"new-{number}")
        assert rig.store(new).success
        assert rig.load(new) == set(new)
    assert rig.tier.stats()["evicted_blocks_total"] > 0
    assert 0 < len(rig.load([key for key in old if rig.lookup(key)])) < BLOCKS


@pytest.mark.one_quick(2)
def test_a_full_disk_is_opened_reset_and_purged(open_rig: OpenRig, path: Path, disk: SmallDisk) -> None:
    rig = open_rig()
    keys = make_keys(BLOCKS)
    assert rig.store(keys).success
    rig.tier.shutdown()
    disk.fill()
    rig.reopen()
    assert any(rig.lookup(key) for key in keys)
    other = open_rig(namespace=OTHER)  # a directory, its readable form and a mark take room
    assert other.store(make_keys(4, "other")).success
    rig.tier.reset_cache()
    assert rig.store(make_keys(4, "after")).success
    rig.reopen()
    assert not any(rig.lookup(key) for key in keys)
    for tier in (rig.tier, other.tier):
        tier.shutdown()
    disk.fill()
    for digest in (DIGEST, OTHER):
        blocks, left = purge(path, digest)
        assert (bool(blocks), left) == (True, ())
    assert fs_blocks(path) == []


@pytest.mark.one_quick(5)
@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_directory_without_a_block_on_a_full_disk_fails_stores_until_there_is_space(
    open_rig: OpenRig, path: Path, disk: SmallDisk, is_claimed: bool
) -> None:
    path.mkdir(mode=0o700)
    if is_claimed:
        open_rig(namespace=OTHER).tier.shutdown()
    disk.fill()
    rig = open_rig()
    keys = make_keys(4)
    assert rig.store(keys).reason == "no_space"
    assert not any(rig.lookup(key) for key in keys)
    disk.free()
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)
    rig.reopen()
    assert all(rig.lookup(key) for key in keys)


@pytest.mark.one_quick(2)
def test_two_tiers_store_on_a_full_disk(open_rig: OpenRig, path: Path, disk: SmallDisk) -> None:
    rigs = open_rig(), open_rig()
    assert all(rig.store(make_keys(BLOCKS // 2, f"old-{at}")).success for at, rig in enumerate(rigs))
    disk.fill()
    for number in range(4):
        jobs = [rig.submit_store(make_keys(4, f"new-{at}-{number}")) for at, rig in enumerate(rigs)]
        results = [rig.wait([job])[0] for rig, job in zip(rigs, jobs, strict=True)]
        assert [result.success for result in results] == [True, True]


def test_a_disk_that_stays_full_whatever_gives_way_costs_few_blocks(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes each byte at once: not all blocks may go for nothing."""
    rig = open_rig()
    assert rig.store(make_keys(160)).success

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    for number in range(20):
        assert rig.store(make_keys(4, f"new-{number}")).reason == "no_space"
    assert len(fs_blocks(path)) > 40
    assert not list(path.rglob("*.tmp"))


Refuse = Callable[[int], None]


@pytest.fixture
def stuck(path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths that cannot be deleted; as immutable files, which only root can make."""
    names: set[str] = set()
    unlink = os.unlink

    def refuse(name: str, *, dir_fd: int | None = None) -> None:
        if str(name) in names:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    return names


def test_a_block_that_cannot_be_deleted_is_passed_over_with_one_warning(
    open_rig: OpenRig, path: Path, stuck: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(capacity=8 << 20)
    assert rig.store(make_keys(16, "stuck")).success
    stuck.update(map(str, fs_blocks(path)))
    for name in stuck:
        os.utime(name, (1, 1))  # the first to evict
    for number in range(20):
        assert rig.store(make_keys(8, f"more-{number}")).success
    assert all(os.path.exists(name) for name in stuck)
    (line,) = [text for text in caplog.messages if "cannot be deleted" in text]
    assert os.strerror(errno.EPERM) in line
    assert any(name in line for name in stuck)


def test_blocks_that_cannot_be_deleted_and_fill_the_capacity_fail_stores_in_bounded_time(
    open_rig: OpenRig, path: Path, stuck: set[str]
) -> None:
    rig = open_rig(capacity=8 << 20)
    assert rig.store(make_keys(90, "stuck")).success
    stuck.update(map(str, fs_blocks(path)))
    assert len(stuck) == 90
    wait_until(lambda: rig.store(make_keys(8, f"more {time.monotonic_ns()}")).reason == "no_space")
    stuck.clear()
    wait_until(lambda: rig.store(make_keys(8, "again")).success)


def test_a_purge_names_what_it_cannot_delete_and_deletes_the_rest(
    open_rig: OpenRig, path: Path, stuck: set[str]
) -> None:
    rig = open_rig()
    assert rig.store(make_keys(8)).success
    rig.tier.shutdown()
    victims = [str(block) for block in fs_blocks(path)[:2]]
    stuck.update(victims)
    blocks, left = purge(path, DIGEST)
    assert blocks == 6
    assert [str(block) for block in fs_blocks(path)] == victims
    for victim in victims:
        assert [text for text in left if victim in text and os.strerror(errno.EPERM) in text and "EPERM" in text]
    stuck.clear()
    assert purge(path, DIGEST) == (2, ())


def test_a_file_is_charged_what_it_occupies(open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system with clusters of 256 KiB."""
    cluster_bytes = 256 << 10
    lstat = os.lstat

    def on_clusters(path: str, *, dir_fd: int | None = None) -> os.stat_result:
        found = lstat(path, dir_fd=dir_fd)
        if not stat.S_ISREG(found.st_mode):
            return found
        return os.stat_result(list(found), {"st_blocks": -(-found.st_size // cluster_bytes) * cluster_bytes // 512})

    rig = open_rig()
    assert rig.store(make_keys(1, "first")).success
    monkeypatch.setattr(os, "lstat", on_clusters)
    assert rig.store(make_keys(16)).success
    rig.tier.shutdown()
    assert fs_ledger(path)["total_bytes"] >= 16 * cluster_bytes
    assert fs_ledger(path)["unit_bytes"] == cluster_bytes
