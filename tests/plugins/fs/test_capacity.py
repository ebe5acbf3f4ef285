"""The capacity of a shared directory: grants, eviction and surveys."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.disk_use import fs_blocks, fs_ledger, occupied_bytes
from tests.support.entries import OpenRig
from tests.support.faulty import Gate
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv_fs.ledger import DirectoryLedger, Holder
from tiered_kv_fs.locks import locked
from tiered_kv_fs.names import TEMPORARY_BLOCK
from tiered_kv_fs.tier import FsTier

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 8 << 20
DIGEST = bytes(range(16))


def test_unused_grants_are_returned_at_the_end(open_rig: OpenRig, path: Path) -> None:
    first, second = open_rig(), open_rig()
    for rig in (first, second):
        assert rig.store(make_keys(2)).success
    first.tier.shutdown()
    assert len(fs_ledger(path)["holders"]) == 1
    second.tier.shutdown()
    state = fs_ledger(path)
    assert state["holders"] == {}
    assert occupied_bytes(path) <= state["total_bytes"] < occupied_bytes(path) + (256 << 10)


def test_blocks_of_a_retired_epoch_make_room_first_and_its_directories_go_with_the_last(
    open_rig: OpenRig, path: Path
) -> None:
    rig = open_rig()
    old, new = make_keys(32, "old"), make_keys(24, "new")
    assert rig.store(old).success
    retired = fs_blocks(path)[0].parent.parent
    rig.tier.reset_cache()
    assert rig.store(new).success
    for number in range(7):
        assert rig.store(make_keys(8, f"batch-{number}")).success
    assert rig.tier.stats()["evicted_blocks_total"] > 0
    assert rig.load(new) == set(new)
    number = 0
    while retired.exists():
        assert rig.store(make_keys(8, f"more-{number}")).success
        number += 1
        assert number < 200


@pytest.mark.slow
def test_blocks_of_an_epoch_that_another_process_is_still_in_stay(open_rig: OpenRig, path: Path) -> None:
    staying, resetting = open_rig(), open_rig()
    keys = make_keys(8, "old")
    assert staying.store(keys).success
    resetting.tier.reset_cache()
    for number in range(6):
        assert resetting.store(make_keys(8, f"batch-{number}")).success
    for entry in fs_blocks(path):
        os.utime(entry, (1, 1))
    assert staying.load(keys) == set(keys)  # marks them as used
    for number in range(7):
        assert resetting.store(make_keys(8, f"more-{number}")).success
    assert resetting.tier.stats()["evicted_blocks_total"] > 0
    assert staying.load(keys) == set(keys)


def test_temporary_files_of_a_lapsed_writer_are_removed_and_young_ones_stay(open_rig: OpenRig, path: Path) -> None:
    rig = open_rig()
    assert rig.store(make_keys(4)).success
    shard = fs_blocks(path)[0].parent
    left, young = (shard / f".{'0' * 32}.{owner * 16}.0.tmp" for owner in "ab")
    small = path / f".ledger.{'0' * 16}.tmp"
    for entry in (left, young, small):
        entry.write_bytes(bytes(1000))
    for entry in (left, small):
        os.utime(entry, (1, 1))
    rig.tier.shutdown()
    (path / "ledger").unlink()
    rig.reopen()
    wait_until(lambda: rig.store(make_keys(4, "again")).success)
    assert TEMPORARY_BLOCK.fullmatch(left.name)
    assert not left.exists()
    assert not small.exists()
    assert young.exists()


def test_blocks_make_room_also_if_all_were_used_since_they_were_listed(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps: list[tuple[object, object]] = []

    def use_all(tier: FsTier, oldest_s: float) -> None:
        stats = tier.stats()
        sweeps.append((stats["surveys_total"], stats["evicted_blocks_total"]))
        for block in fs_blocks(path):
            with suppress(FileNotFoundError):
                os.utime(block)

    monkeypatch.setattr("tiered_kv_fs.tier.FsTier._note_age", use_all)  # called before a sweep evicts
    rig = open_rig()
    for number in range(30):
        assert rig.store(make_keys(8, f"batch-{number}")).success, "a sweep passed over all blocks, and gave up"
    assert rig.tier.stats()["failed_calls_total"] == {}
    assert rig.tier.stats()["evicted_blocks_total"] > 0
    assert occupied_bytes(path) <= CAPACITY_BYTES
    assert len(sweeps) == len(set(sweeps)), "ages were learned from the uses that a sweep had written itself"


def test_foreign_files_that_leave_no_room_fail_stores_at_once(open_rig: OpenRig, path: Path) -> None:
    rig = open_rig()
    keys = make_keys(4)
    assert rig.store(keys).success
    (path / "backup").write_bytes(bytes(CAPACITY_BYTES))
    rig.reopen()
    (path / "ledger").unlink()  # so that a survey counts
    wait_until(lambda: rig.store(make_keys(8, "more")).reason == "no_space")
    assert rig.tier.stats()["failed_calls_total"]["no_space"] > 0
    (path / "backup").unlink()
    (path / "ledger").unlink()
    wait_until(lambda: rig.store(make_keys(8, "again")).success)


def test_a_foreign_directory_that_may_not_be_read_does_not_keep_the_tier_from_storing(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read any directory, so the call that fails for other users is made to fail."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    open_rig().close()
    closed = path / "backup" / "deep"
    closed.mkdir(parents=True)
    os.chown(closed, 12345, 12345)
    (path / "ledger").unlink()
    scandir = os.scandir

    def scandir_as_a_user(directory: str) -> object:
        if directory == str(closed):
            raise PermissionError(13, "Permission denied", directory)
        return scandir(directory)

    monkeypatch.setattr(os, "scandir", scandir_as_a_user)
    rig = open_rig()
    assert rig.store(make_keys(8)).success
    assert rig.tier.stats()["surveys_total"] > 0


@pytest.mark.slow
def test_the_grant_of_a_writer_that_was_killed_is_free_again_once_it_has_lapsed(open_rig: OpenRig, path: Path) -> None:
    rig = open_rig()
    assert rig.store(make_keys(4)).success
    rig.tier.shutdown()
    with DirectoryLedger(str(path)).locked() as state:
        state.add(CAPACITY_BYTES // 2)
        state.holders["0" * 16] = Holder(DIGEST.hex(), "f" * 16, CAPACITY_BYTES // 2, state.now_s - 3600)
    rig.reopen()
    for number in range(20):
        assert rig.store(make_keys(8, f"after-{number}")).success
    assert rig.tier.stats()["surveys_total"] > 0
    assert len(fs_ledger(path)["holders"]) == 1
    assert occupied_bytes(path) <= CAPACITY_BYTES


@pytest.mark.slow
def test_a_tier_that_lapsed_and_goes_on_stores_within_a_new_grant(open_rig: OpenRig, path: Path, gate: Gate) -> None:
    stopped, other = open_rig(), open_rig()
    for rig in (stopped, other):
        assert rig.store(make_keys(8)).success
    gate.close()
    stopped.tier._event_loop.call_soon_threadsafe(gate.pass_through)  # type: ignore[attr-defined]  # the loop is blocked
    wait_until(lambda: gate.waiting)
    with DirectoryLedger(str(path)).locked() as state:
        for holder in state.holders.values():
            holder.seen_s -= 3600
    for number in range(20):  # more than fits: surveys and evicts
        other.store(make_keys(8, f"other-{number}"))
        assert occupied_bytes(path) <= CAPACITY_BYTES
    late = stopped.submit_store(make_keys(8, "after"))
    gate.open()
    stopped.wait([late])  # what it may lose is a store
    wait_until(lambda: stopped.store(make_keys(8, "later")).success)
    assert occupied_bytes(path) <= CAPACITY_BYTES
    for rig in (stopped, other):
        rig.tier.shutdown()
    assert fs_ledger(path)["holders"] == {}


@pytest.mark.slow
def test_a_process_that_stops_with_the_lock_delays_stores_for_a_bounded_time_and_no_loads(
    open_rig: OpenRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv_fs.grants._REFUSAL_S", 1.0)  # as it is outside of these tests
    monkeypatch.setattr("tiered_kv_fs.tier._ROOM_TIMEOUT_MAX_S", 5.0)
    rig = open_rig()
    keys = make_keys(4)
    assert rig.store(keys).success
    with locked(str(path / "lock"), 60.0):
        begin = time.monotonic()
        far = begin + 3600.0
        stores = rig.wait([rig.submit_store(make_keys(8, f"batch-{number}"), deadline=far) for number in range(20)])
        assert time.monotonic() - begin < 40.0, "each waited for itself, five seconds"
        assert not all(result.success for result in stores)
        assert {result.reason for result in stores if not result.success} <= {"timeout", "no_space"}
        assert rig.load(keys) == set(keys)
    wait_until(lambda: rig.store(make_keys(8, "afterwards")).success)
