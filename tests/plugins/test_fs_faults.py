"""What goes wrong under the fs tier costs blocks, is counted, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

import tiered_kv
import tiered_kv_fs
from tests.support.disk_use import occupied_bytes
from tests.support.entries import rig_of
from tiered_kv.counters import count_of
from tiered_kv.errors import MissingExtraError
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.toolkit.record import decode_record
from tiered_kv_fs import blocks as block_files
from tiered_kv_fs import files, tiered_kv_register_tiers
from tiered_kv_fs.layout import BLOCK
from tiered_kv_fs.ledger import Ledger

BLOCK_BYTES = 4096
EXAMPLE = Path(__file__).parents[2] / "examples" / "fs.yaml"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def rig_at(path: Path, capacity: int) -> TierRig:
    entry = {"type": "fs", "path": str(path), "capacity": capacity, "threads": 4, "job_timeout": "120s"}
    return rig_of(entry, block_bytes=BLOCK_BYTES, num_blocks=512)


@pytest.fixture
def open_rig(path: Path, monkeypatch: pytest.MonkeyPatch, patient_fs_shutdown: None) -> Iterator[Callable[[], TierRig]]:
    monkeypatch.setattr("tiered_kv_fs.tier._ROOM_TIMEOUT_MAX_S", 60.0)  # or a busy machine makes stores find no room
    rigs: list[TierRig] = []

    def open_one() -> TierRig:
        rigs.append(rig_at(path, 16 << 20))
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(open_rig: Callable[[], TierRig]) -> TierRig:
    return open_rig()


@pytest.fixture
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, mounted where the tier keeps its directory."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def blocks(path: Path) -> list[Path]:
    return sorted(entry for entry in path.rglob("*") if BLOCK.fullmatch(entry.name) and entry.is_file())


def fail(code: int) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:100], "truncated"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: data + b"\0", "bad_length"),
        (lambda data: b"\0" + data[1:], "bad_magic"),
        (lambda data: data[:72] + bytes([data[72] ^ 1]) + data[73:], "checksum"),
        (lambda data: b"", "truncated"),
    ],
    ids=["cut", "cut_in_header", "flipped", "longer", "no_magic", "flipped_checksum", "empty"],
)
def test_a_damaged_block_is_a_counted_miss_and_its_file_goes(
    rig: TierRig, path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    keys = make_keys(3)
    rig.store(keys)
    victim = blocks(path)[0]
    victim.write_bytes(damage(victim.read_bytes()))
    assert len(rig.load(keys)) == 2
    assert not victim.exists()
    assert rig.tier.stats()["corrupt_blocks_total"] == {reason: 1}
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)


def test_a_block_under_another_block_s_name_is_a_miss(rig: TierRig, path: Path) -> None:
    keys = make_keys(2)
    rig.store(keys)
    first, second = blocks(path)
    first.write_bytes(second.read_bytes())
    assert len(rig.load(keys)) == 1
    assert count_of(rig.tier.stats(), "corrupt_blocks_total", "wrong_key") == 1


def test_a_damaged_file_that_was_replaced_meanwhile_stays(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(1)
    rig.store(keys)
    (victim,) = blocks(path)
    good = victim.read_bytes()
    victim.write_bytes(good[:-1])

    def decode_late(*arguments: object) -> object:
        verdict = decode_record(*arguments)  # type: ignore[arg-type]  # whatever it was called with
        fresh = path / "fresh"
        fresh.write_bytes(good)
        fresh.rename(victim)
        return verdict

    with monkeypatch.context() as patch:
        patch.setattr(block_files, "decode_record", decode_late)
        assert rig.load(keys) == set()
    assert rig.load(keys) == set(keys)


def test_a_block_that_vanished_is_a_miss(rig: TierRig, path: Path) -> None:
    keys = make_keys(4)
    rig.store(keys)
    blocks(path)[0].unlink()
    assert len(rig.load(keys)) == 3
    assert rig.tier.stats()["failed_calls_total"]["absent"] == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EROFS, "read_only"),
        (errno.EACCES, "permission"),
        (errno.ESTALE, "stale"),
        (errno.EIO, "io_error"),
    ],
)
def test_a_failing_write_is_counted_by_reason_and_leaves_nothing(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    rig.store(make_keys(1, "first"))
    with monkeypatch.context() as patch:
        patch.setattr(block_files, "write_all", fail(code))
        result = rig.store(make_keys(2))
    assert (result.success, result.reason) == (False, reason)
    assert rig.tier.stats()["failed_calls_total"][reason] == 2
    assert len(blocks(path)) == 1
    assert not list(path.rglob("*.tmp"))
    assert rig.store(make_keys(2)).success


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EIO, "io_error"), (errno.ESTALE, "stale"), (errno.EACCES, "permission")]
)
def test_a_failing_read_is_counted_by_reason_and_the_file_stays(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    keys = make_keys(2)
    rig.store(keys)
    with monkeypatch.context() as patch:
        patch.setattr(block_files, "read_all", fail(code))
        assert rig.load(keys) == set()
    assert rig.tier.stats()["failed_calls_total"][reason] == 2
    assert rig.load(keys) == set(keys)


def test_a_full_file_system_fails_stores_and_nothing_else(small_disk: Path, open_rig: Callable[[], TierRig]) -> None:
    rig = open_rig()
    results = [rig.store(make_keys(16, f"batch-{number}")) for number in range(32)]
    failed = [result for result in results if not result.success]
    assert failed
    assert {result.reason for result in failed} == {"no_space"}
    assert not list(small_disk.rglob("*.tmp"))
    stored = [key for number in range(32) for key in make_keys(16, f"batch-{number}") if rig.lookup(key)]
    assert len(stored) == len(blocks(small_disk)) > 100
    assert rig.load(stored) == set(stored)
    for block in blocks(small_disk)[:50]:
        block.unlink()
    wait_until(lambda: rig.store(make_keys(16, "afterwards")).success)  # a refusal stands for a second


def test_a_directory_that_somebody_deletes_is_made_again(rig: TierRig, path: Path) -> None:
    keys = make_keys(8)
    rig.store(keys)

    def is_deleted() -> bool:
        with contextlib.suppress(OSError):  # the tier writes its ledger meanwhile
            shutil.rmtree(path)
        return not path.exists()

    wait_until(is_deleted)
    assert not any(rig.lookup(key) for key in keys)
    assert rig.load(keys) == set()
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)
    assert (path / "tiered-kv-fs.json").exists()


def test_a_directory_that_somebody_empties_is_furnished_again_though_a_keeper_writes_meanwhile(
    rig: TierRig, path: Path
) -> None:
    keys = make_keys(8)
    assert rig.store(keys).success
    with Ledger(str(path / "ledger"), str(path / "lock")).locked():  # as a keeper, which writes it anew at the end
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)
    rig.reopen()
    assert rig.load(keys) == set(keys)


@pytest.mark.parametrize("text", [b"", b"garbage", b"[]", b'{"total_bytes": -1, "holders": {}}'])
def test_a_ledger_that_is_damaged_or_lost_is_counted_anew(rig: TierRig, path: Path, text: bytes) -> None:
    keys = make_keys(64)
    rig.store(keys)
    rig.tier.shutdown()
    (path / "ledger").write_bytes(text)
    rig.reopen()
    assert rig.store(make_keys(64, "more")).success
    assert rig.load(keys) == set(keys)
    assert rig.tier.stats()["used_bytes"] > 128 * BLOCK_BYTES


def test_the_oldest_use_goes_first(rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "TOUCH_INTERVAL_S", 0.0)
    used, unused = make_keys(50, "used"), make_keys(350, "unused")
    rig.store(used)
    rig.store(unused)
    for block in blocks(path):
        os.utime(block, (1, 1))
    assert rig.load(used) == set(used)
    number = 0
    while rig.tier.stats()["evicted_blocks_total"] == 0:
        assert rig.store(make_keys(64, f"batch-{number}")).success
        number += 1
    left = [key for key in unused if rig.lookup(key)]
    assert len(left) < 350
    # A sweep may remove more than is needed, since grants count as filled: then all of the older ones go first.
    assert rig.load(used) == set(used) or not left


def test_a_lock_that_is_removed_while_it_is_waited_for_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with files.locked(path, 1.0):
        with pytest.raises(TimeoutError), files.locked(path, 0.05):
            pass
        os.unlink(path)
        with files.locked(path, 1.0):
            assert os.path.exists(path)


@pytest.mark.slow
def test_reads_that_hang_hold_up_neither_lookups_nor_stores_nor_shutdown(
    open_rig: Callable[[], TierRig], monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr("tiered_kv_fs.tier._SHUTDOWN_TIMEOUT_S", 2.0)  # the product's: what hangs is left behind
    rig = open_rig()
    keys = make_keys(64)
    rig.store(keys)
    read_all = files.read_all

    def read_late(fd: int, views: list[memoryview]) -> int:
        gate.pass_through()
        return read_all(fd, views)

    with monkeypatch.context() as patch:
        patch.setattr(block_files, "read_all", read_late)
        gate.close()
        rig.submit_load(keys[:2])
        wait_until(lambda: gate.waiting)
        assert all(rig.lookup(key) for key in keys)
        assert rig.store(make_keys(2, "meanwhile")).success
        begin = time.monotonic()
        rig.tier.shutdown()
        assert time.monotonic() - begin < 60.0, "the gate is not opened before"
        gate.open()


def test_no_more_transfers_run_than_there_are_threads_however_small_so_lookups_have_theirs(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    keys = make_keys(40)
    assert rig.store(keys).success
    read_all = files.read_all

    def read_late(fd: int, views: list[memoryview]) -> int:
        gate.pass_through()
        return read_all(fd, views)

    with monkeypatch.context() as patch:
        patch.setattr(block_files, "read_all", read_late)
        gate.close()
        loads = [rig.submit_load([key]) for key in keys]
        wait_until(lambda: gate.waiting == 4)
        assert all(rig.lookup(key) for key in keys)
        assert gate.waiting == 4
        gate.open()
        assert all(result.success for result in rig.wait(loads))


def test_a_job_that_hangs_is_reported_when_its_thread_lets_go_of_the_blocks(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    keys = make_keys(2)
    rig.store(keys)
    read_all = files.read_all

    def read_late(fd: int, views: list[memoryview]) -> int:
        gate.pass_through()
        return read_all(fd, views)

    with monkeypatch.context() as patch:
        patch.setattr(block_files, "read_all", read_late)
        gate.close()
        for timeout_s in (0.05, 0.5, 5.0, 50.0):  # one that a busy machine holds up may expire before it begins
            deadline = time.monotonic() + timeout_s
            job = rig.submit_load(keys, deadline=deadline)
            wait_until(lambda: gate.waiting or not rig.poll(), 120.0)
            if gate.waiting:
                break
        else:
            pytest.fail("no load begins")
        wait_until(lambda: time.monotonic() > deadline + 0.1)
        loop = rig.tier._event_loop  # type: ignore[attr-defined]
        for _ in range(2):  # the second begins after what the first has found to be due
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60.0)
        assert not list(rig.tier.get_finished())
        gate.open()
        (result,) = rig.wait([job])
    assert result.reason == "expired"


def test_a_capacity_that_was_lowered_holds_before_anything_is_added(rig: TierRig, path: Path) -> None:
    for number in range(20):
        rig.store(make_keys(64, f"batch-{number}"))
    rig.tier.shutdown()
    small = rig_at(path, 4 << 20)
    try:
        assert small.store(make_keys(8, "new")).success
        assert occupied_bytes(path) <= 4 << 20
    finally:
        small.close()


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiofiles.os", None)
    (tier_type,) = tiered_kv_register_tiers()
    with pytest.raises(MissingExtraError, match=r"tiered-kv\[fs\]"):
        tier_type.load()


@pytest.mark.slow
def test_the_example_finds_its_blocks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fs" not in tiered_kv.tier_plugins().tier_types():
        tiered_kv.tier_plugins().register(tiered_kv_fs)
    monkeypatch.chdir(tmp_path)
    entries = yaml.safe_load(EXAMPLE.read_text())
    entries["secondary"][0]["lookup_timeout"] = "60s"  # so that no block is a miss because the machine is busy
    keys = make_keys(32)
    written = np.random.default_rng(0).integers(0, 256, (32, 65_536), dtype=np.uint8)
    with tiered_kv.open_stack(entries) as stack:
        assert stack.put(keys, written) == 32
        assert stack.flush(timeout=60.0)
    with tiered_kv.open_stack(entries) as stack:
        read = np.empty_like(written)
        assert stack.get(keys, read, timeout=60.0) == 32
        assert (read == written).all()
        assert stack.secondary_tiers[0].describe()["codec"] == "raw"


def test_a_marker_is_on_the_device_before_it_is_in_its_place(
    open_rig: Callable[[], TierRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure leaves an empty file otherwise, and with that the directory would be refused for good."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_flush(fd: int) -> None:
        steps.append("flush " + os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2])
        fsync(fd)

    def note_replace(source: str, target: str) -> None:
        if target.rpartition("/")[2] == "tiered-kv-fs.json":
            steps.append("rename " + source.rpartition("/")[2])
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "replace", note_replace)
    open_rig()
    assert [step.partition(" ")[0] for step in steps] == ["flush", "rename"]
    assert steps[0].partition(" ")[2] == steps[1].partition(" ")[2]


def test_a_reset_that_could_not_be_written_at_once_is_written_before_the_tier_is_closed(
    open_rig: Callable[[], TierRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig()
    keys = make_keys(4)
    assert rig.store(keys).success
    tried = threading.Event()

    def replace(source: str, target: str) -> None:
        tried.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO), target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        rig.tier.reset_cache()
        assert tried.wait(60.0)
    rig.reopen()
    assert not any(rig.lookup(key) for key in keys)
    assert rig.store(keys).success


def test_a_reset_does_not_wait_for_a_file_system_that_hangs(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    keys = make_keys(4)
    assert rig.store(keys).success
    replace = os.replace

    def replace_late(source: str, target: str) -> None:
        gate.pass_through()
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_late)
        gate.close()
        assert rig.tier.reset_cache()
        assert rig.tier.reset_cache()
        wait_until(lambda: gate.waiting)
        gate.open()
        assert rig.load(keys) == set()
    rig.reopen()
    assert rig.load(keys) == set()
