"""A reset of one process on a shared storage stays done, whatever becomes of the mark that the storage keeps of it."""

from __future__ import annotations

import pytest

from tests.support.redis_servers import redis_server
from tests.support.shared_storage import SharedStorage, storage
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.epoch import EpochMark, forget_retired

__all__ = ["redis_server", "storage"]

pytestmark = pytest.mark.parametrize("storage", ["fs", "redis", "s3"], indirect=True)

OLD, NEW, LATE = make_keys(4, "old"), make_keys(4, "new"), make_keys(4, "late")


def test_after_a_reset_others_keep_their_epoch_and_newcomers_take_the_new_one(storage: SharedStorage) -> None:
    resetting, other = storage.open(), storage.open()
    assert resetting.store(OLD).success
    assert other.load(OLD) == set(OLD)
    assert resetting.tier.reset_cache()
    assert resetting.store(NEW).success
    assert other.store(LATE).success
    newcomer = storage.open()
    for rig in (resetting, newcomer):
        assert rig.lookup_all([*OLD, *LATE, *NEW]) == [False] * 8 + [True] * 4
        assert rig.load([*OLD, *LATE, *NEW]) == set(NEW)
    assert other.load([*OLD, *LATE, *NEW]) == {*OLD, *LATE}, "nobody reset it"


@pytest.mark.parametrize("found", [None, b"", b"nonsense", b"x" * 5000])
def test_a_mark_that_is_gone_or_damaged_is_drawn_anew_and_brings_no_block_back(
    storage: SharedStorage, found: bytes | None
) -> None:
    rig = storage.open()
    assert rig.store(OLD).success
    rig.close()
    before = storage.read_mark()
    storage.write_mark(found)
    newcomer = storage.open()
    assert newcomer.load(OLD) == set()
    assert not any(newcomer.lookup_all(OLD))
    wait_until(lambda: newcomer.store(NEW).success)
    assert newcomer.load(NEW) == set(NEW)
    mark = EpochMark.decode(storage.read_mark() or b"")
    assert mark is not None
    assert mark != EpochMark.decode(before or b"")


def test_a_mark_from_before_a_reset_is_joined_by_no_process_that_has_seen_it_retired(storage: SharedStorage) -> None:
    rig = storage.open()
    assert rig.store(OLD).success
    old = storage.read_mark()
    assert rig.tier.reset_cache()
    assert rig.store(NEW).success
    wait_until(lambda: storage.read_mark() != old)
    rig.close()
    storage.write_mark(old)  # as when a storage is restored
    newcomer = storage.open()
    assert newcomer.load(OLD) == set()
    assert newcomer.store(LATE).success
    wait_until(lambda: storage.read_mark() != old)


@pytest.mark.parametrize("falls_back", [False, True], ids=["lost", "older"])
def test_a_mark_that_is_lost_or_older_while_a_process_runs_is_written_again_and_counted(
    storage: SharedStorage, falls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = storage.open()
    assert rig.store(OLD).success
    old = storage.read_mark()
    assert rig.tier.reset_cache()
    assert rig.store(NEW).success
    wait_until(lambda: storage.read_mark() != old)
    mark = storage.read_mark()
    storage.write_mark(old if falls_back else None)  # as when a server comes back with an older snapshot
    monkeypatch.setattr("tiered_kv.toolkit.epoch.CHECK_PAUSE_S", 0.0)
    assert rig.load([*OLD, *NEW]) == set(NEW)
    assert storage.read_mark() == mark
    assert rig.tier.stats()["epoch_repairs_total"] == 1
    forget_retired()  # as in a process that has not seen the reset
    assert storage.open().load([*OLD, *NEW]) == set(NEW)
