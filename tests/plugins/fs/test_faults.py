"""An fs directory: faults of its file system are misses and failed stores, counted; foreign entries stay."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_use import fs_blocks, occupied_bytes
from tests.support.entries import OpenRig
from tests.support.faulty import Gate
from tiered_kv.errors import ConfigError, FormatError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.toolkit import small_files
from tiered_kv.toolkit.record import HEADER_BYTES, decode_record
from tiered_kv_fs import blocks as block_files
from tiered_kv_fs.ledger import DirectoryLedger
from tiered_kv_fs.locks import locked

BLOCK_BYTES = 4096
CAPACITY_BYTES = 16 << 20


@pytest.fixture
def rig(open_rig: OpenRig) -> TierRig:
    return open_rig()


def fail(code: int) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("call", "code", "operation", "reason"),
    [
        ("pwritev", errno.EACCES, "writing blocks", "permission"),
        ("pwritev", errno.EIO, "writing blocks", "io_error"),
        ("preadv", errno.ESTALE, "reading blocks", "stale"),
        ("lstat", errno.EIO, "looking for blocks", "io_error"),
    ],
)
def test_a_failing_call_is_counted_by_reason_and_logged_once_with_the_system_s_words(
    rig: TierRig,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
    operation: str,
    reason: str,
) -> None:
    keys = make_keys(2)
    rig.store(keys)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(code))
        for _ in range(2):
            is_stored = rig.store(make_keys(2, "more")).success
            rig.wait([rig.submit_load(keys)])
            rig.lookup_all(make_keys(2, "other"))
    assert rig.tier.stats()["failed_calls_total"][reason] >= 2
    (line,) = [text for text in caplog.messages if f"{operation} failed" in text]
    assert str(path) in line
    assert os.strerror(code) in line
    assert not list(path.rglob("*.tmp"))
    assert len(fs_blocks(path)) == 2 + 2 * is_stored
    assert rig.store(make_keys(2, "more")).success


def test_a_reset_that_cannot_be_written_is_logged_in_one_line(
    rig: TierRig, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store(make_keys(1))
    (epoch,) = path.glob("*/epoch")
    epoch.unlink()
    epoch.mkdir()
    rig.tier.reset_cache()
    wait_until(lambda: not rig.store(make_keys(1, "later")).success and bool(caplog.records), 5.0)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("code", "is_offered"), [(errno.ESTALE, False), (errno.ENOMEM, True)])
def test_a_block_that_cannot_be_read_is_not_offered_until_it_can_unless_for_want_of_memory(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch, code: int, is_offered: bool
) -> None:
    keys = make_keys(2)
    rig.store(keys)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail(code))
        assert rig.load(keys) == set()
    assert sum(rig.tier.stats()["failed_calls_total"].values()) == 2
    assert rig.lookup_all(keys) == [is_offered] * 2, "a block that always fails would be offered again and again"
    assert rig.load(keys) == set(keys)
    assert rig.lookup_all(keys) == [True] * 2


def test_a_file_that_ends_behind_its_header_is_a_counted_miss(rig: TierRig, path: Path) -> None:
    keys = make_keys(1)
    rig.store(keys)
    (victim,) = fs_blocks(path)
    os.truncate(victim, HEADER_BYTES)
    assert rig.load(keys) == set()
    assert sum(rig.tier.stats()["corrupt_blocks_total"].values()) == 1


def test_a_damaged_file_that_was_replaced_meanwhile_stays(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(1)
    rig.store(keys)
    (victim,) = fs_blocks(path)
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


@pytest.mark.parametrize("holds_ledger", [False, True], ids=["deleted", "emptied while the ledger is used"])
def test_a_directory_that_somebody_deletes_is_made_again(rig: TierRig, path: Path, holds_ledger: bool) -> None:
    keys = make_keys(8)
    assert rig.store(keys).success

    def is_deleted() -> bool:
        with contextlib.suppress(OSError):  # the tier writes its ledger meanwhile
            shutil.rmtree(path)
        return not path.exists()

    if holds_ledger:
        with DirectoryLedger(str(path)).locked():  # which writes the ledger anew at the end
            for entry in path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    else:
        wait_until(is_deleted)
    assert not any(rig.lookup(key) for key in keys)
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)
    rig.reopen()
    assert rig.load(keys) == set(keys)


def test_another_file_system_in_place_of_the_directory_gets_no_blocks(
    rig: TierRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(8)
    assert rig.store(keys).success
    with monkeypatch.context() as patch:
        patch.setattr(rig.tier._directory, "_place", (-1, -1))  # type: ignore[attr-defined]  # as after a mount
        shutil.move(path, path.with_name("unmounted"))
        wait_until(lambda: not rig.store(keys).success and count_of(rig.tier.stats(), "failed_calls_total", "io_error"))
        assert not list(path.rglob("namespace.json"))
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)


LEDGER = b'{"total_bytes": %b, "pending_bytes": 0, "surveyed_s": 0, "holders": {}}'


@pytest.mark.one_quick(3)
@pytest.mark.parametrize("text", [b"garbage", b"[]", b"[" * 100_000, LEDGER % b"-9", LEDGER % b'"1"'], ids=range(5))
def test_a_damaged_ledger_is_replaced_by_a_survey(rig: TierRig, path: Path, text: bytes) -> None:
    keys = make_keys(64)
    rig.store(keys)
    rig.tier.shutdown()
    (path / "ledger").write_bytes(text)
    rig.reopen()
    assert rig.store(make_keys(64, "more")).success
    assert rig.load(keys) == set(keys)
    assert rig.tier.stats()["used_bytes"] > 128 * BLOCK_BYTES


def test_the_oldest_use_goes_first(open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "TOUCH_INTERVAL_S", 0.0)
    rig, used, unused = open_rig(capacity=8 << 20), make_keys(50, "used"), make_keys(350, "unused")
    rig.store(used)
    rig.store(unused)
    for block in fs_blocks(path):
        os.utime(block, (1, 1))
    assert rig.load(used) == set(used)
    number = 0
    while rig.tier.stats()["evicted_blocks_total"] == 0:
        assert rig.store(make_keys(64, f"batch-{number}")).success
        number += 1
    loaded = rig.load(used)
    left = [key for key in unused if rig.lookup(key)]  # after the load: the sweep may still be at work
    assert len(left) < 350
    # A sweep may remove more than is needed, since grants count as filled: then all of the older ones go first.
    assert loaded == set(used) or not left


@pytest.mark.one_quick(3)
@pytest.mark.parametrize("what", ["marker", "ledger", "lock", "sweep", "namespace", "epoch", "name"])
def test_a_part_of_the_directory_that_somebody_deletes_is_made_again(
    open_rig: OpenRig, path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv_fs.grants._TICK_S", 0.05)
    monkeypatch.setattr("tiered_kv.toolkit.epoch.CHECK_PAUSE_S", 0.05)
    rig, keys = open_rig(), make_keys(8)
    assert rig.store(keys).success
    (path / "core.1234").write_bytes(b"foreign")
    (namespace,) = [each for each in path.iterdir() if each.is_dir()]
    inner = {"namespace": namespace, "epoch": namespace / "epoch", "name": namespace / "namespace.json"}
    part = inner.get(what) or path / {"marker": "tiered-kv-fs.json"}.get(what, what)
    if part.exists():  # at once: it is made again soon
        part.rename(path.with_name("deleted"))
    more = make_keys(8, "more")
    wait_until(lambda: rig.store(more).success)
    wait_until(lambda: part.exists() or what == "sweep")
    assert rig.load(more) == set(more)
    rig.reopen()
    assert rig.load(more) == set(more)


def test_a_lock_that_is_removed_while_it_is_waited_for_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with locked(path, 1.0):
        with pytest.raises(TimeoutError), locked(path, 0.05):
            pass
        os.unlink(path)
        with locked(path, 1.0):
            assert os.path.exists(path)


def test_no_more_transfers_run_than_there_are_threads_however_small_so_lookups_have_theirs(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    keys = make_keys(40)
    assert rig.store(keys).success
    read_all = small_files.read_all

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


def test_a_capacity_that_was_lowered_holds_before_anything_is_added(
    open_rig: OpenRig, rig: TierRig, path: Path
) -> None:
    for number in range(12):
        rig.store(make_keys(64, f"batch-{number}"))
    assert occupied_bytes(path) > 4 << 20
    rig.tier.shutdown()
    small = open_rig(capacity=4 << 20)
    assert small.store(make_keys(8, "new")).success
    assert occupied_bytes(path) <= 4 << 20


def test_a_reset_that_could_not_be_written_at_once_is_written_before_the_tier_is_closed(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(4)
    assert rig.store(keys).success
    tried = threading.Event()

    def replace(source: str, target: str, **options: object) -> None:
        tried.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO), target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        rig.tier.reset_cache()
        assert tried.wait(60.0)
    rig.reopen()
    assert not any(rig.lookup(key) for key in keys)
    assert rig.store(keys).success


@pytest.mark.parametrize("operation", ["store", "load"])
def test_after_its_deadline_a_job_takes_no_block_from_its_memory_and_puts_none_there(
    rig: TierRig, monkeypatch: pytest.MonkeyPatch, gate: Gate, operation: str
) -> None:
    """The memory may be reused by then."""
    keys = make_keys(3)
    if operation == "load":
        assert rig.store(keys).success
    call = {"store": "lstat", "load": "open"}[operation]
    original, is_first, moved = getattr(os, call), [True], list[str]()

    def late(name: Any, *arguments: Any, **options: Any) -> Any:
        if re.search(r"/[0-9a-f]{2}/[0-9a-f]{32}$", str(name)) and is_first:  # a block
            is_first.clear()
            gate.pass_through()
        return original(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, late)
        patch.setattr(block_files, "write_all", lambda *_: moved.append("written"))
        patch.setattr(block_files, "read_all", lambda *_: moved.append("read"))
        gate.close()
        clock, hour_s = time.monotonic, 3600.0
        job = getattr(rig, f"submit_{operation}")(keys, deadline=clock() + hour_s)
        wait_until(lambda: gate.waiting)
        patch.setattr(time, "monotonic", lambda: clock() + hour_s)
        gate.open()
        (result,) = rig.wait([job])
    assert result.reason == "expired"
    assert moved == []


def test_one_namespace_has_one_block_size(open_rig: OpenRig, path: Path) -> None:
    open_rig().close()
    with pytest.raises(FormatError, match="holds blocks of 4096 bytes, and these have 8192"):
        open_rig(block_bytes=8192)


def test_a_capacity_that_is_too_small_is_an_error_that_names_the_least(open_rig: OpenRig) -> None:
    with pytest.raises(ConfigError, match="capacity: 65536 bytes are too few for blocks of 4096; give at least 729088"):
        open_rig(capacity=65536)


@pytest.mark.slow
def test_foreign_files_are_left_alone_and_count_against_the_capacity(open_rig: OpenRig, path: Path) -> None:
    rig = open_rig(capacity=4 << 20)
    rig.store(make_keys(2))
    shard = fs_blocks(path)[0].parent
    foreign = [path / "core.1234", path / "backup" / "old.kv", shard / "notes.txt", shard.parent / "zz" / "deep"]
    for entry in foreign:
        entry.parent.mkdir(exist_ok=True)
        entry.write_bytes(bytes(512 << 10))
    rig.reopen()
    for number in range(60):  # a store that comes before the sweep has made room may be refused
        keys = make_keys(16, f"batch-{number}")
        wait_until(lambda keys=keys: rig.store(keys).success)  # type: ignore[misc]
    stats = rig.tier.stats()
    assert stats["evicted_blocks_total"] > 0
    assert all(entry.stat().st_size == 512 << 10 for entry in foreign)
    assert occupied_bytes(path) <= 4 << 20


def test_a_symbolic_link_in_the_place_of_a_block_is_not_followed(rig: TierRig, path: Path, tmp_path: Path) -> None:
    keys = make_keys(8)
    rig.store(keys)
    victim = tmp_path / "victim"
    planted = fs_blocks(path)[0]
    content = planted.read_bytes()
    planted.rename(victim)
    planted.symlink_to(victim)
    (lost,) = [key for key in keys if not rig.lookup(key)]
    assert rig.load(keys) == set(keys) - {lost}
    assert rig.tier.stats()["failed_calls_total"]["not_a_file"] == 1
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)
    assert not planted.is_symlink(), "a block takes the place of a link"
    assert victim.read_bytes() == content


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_directory_in_the_place_of_a_block_is_a_miss(
    rig: TierRig, path: Path, plant: Callable[[Path], None]
) -> None:
    keys = make_keys(1)
    rig.store(keys)
    (planted,) = fs_blocks(path)
    planted.unlink()
    plant(planted)
    assert rig.load(keys) == set()
    assert not rig.lookup(keys[0])
