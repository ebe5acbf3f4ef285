"""A namespace's quota in a shared directory: kept by all of its processes together, and at nobody else's cost."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.testing.disk_use import occupied_bytes
from tiered_kv.testing.entries import rig_of
from tiered_kv.testing.quota_writers import BATCH, BLOCK_BYTES, overfill
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.layout import LEDGER_NAME
from tiered_kv_fs.ledger import Ledger
from tiered_kv_fs.settings import FsSettings

CAPACITY_BYTES = 32 << 20
QUOTA_BYTES = 4 << 20
OURS, THEIRS = bytes(range(16)), bytes(range(1, 17))

OpenRig = Callable[..., TierRig]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def entry_at(path: Path, quota: int | None) -> dict[str, object]:
    entry: dict[str, object] = {"type": "fs", "path": str(path), "capacity": CAPACITY_BYTES, "quota": quota}
    return {**entry, "threads": 4, "job_timeout": "120s"}


@pytest.fixture
def open_rig(path: Path, monkeypatch: pytest.MonkeyPatch, patient_fs_shutdown: None) -> Iterator[OpenRig]:
    """Open tiers on the directory, in this process."""
    monkeypatch.setattr("tiered_kv_fs.tier._ROOM_TIMEOUT_MAX_S", 60.0)  # or a busy machine makes stores find no room
    rigs: list[TierRig] = []

    def open_one(namespace: bytes, quota: int | None = None) -> TierRig:
        rigs.append(rig_of(entry_at(path, quota), block_bytes=BLOCK_BYTES, namespace=namespace))
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.close()


def fill(rig: TierRig, label: str, size_bytes: int) -> int:
    """Store blocks of so many bytes; return the number of batches."""
    batches = size_bytes // (BATCH * BLOCK_BYTES)
    for number in range(batches):
        assert rig.store(make_keys(BATCH, f"{label}-{number}")).success
    return batches


def found(rig: TierRig, label: str, number: int) -> int:
    return sum(rig.lookup_all(make_keys(BATCH, f"{label}-{number}")))


@pytest.mark.slow
def test_processes_that_store_four_times_a_quota_never_exceed_it_together(path: Path, open_rig: OpenRig) -> None:
    others = open_rig(THEIRS)  # a tenant without a quota, in the same capacity
    theirs = fill(others, "theirs", 8 << 20)
    overfilled = overfill(entry_at(path, QUOTA_BYTES), OURS, QUOTA_BYTES, lambda: occupied_bytes(path / OURS.hex()))
    assert overfilled.stored_bytes == 4 * QUOTA_BYTES, "there was room again for each of them"
    assert overfilled.most_bytes > QUOTA_BYTES // 2, "they have not filled it"
    assert all(found(others, "theirs", number) == BATCH for number in range(theirs)), "another's blocks made room"


@pytest.mark.slow
def test_a_quota_evicts_the_namespace_s_own_oldest_blocks_though_others_have_older_ones(
    path: Path, open_rig: OpenRig
) -> None:
    theirs = open_rig(THEIRS)
    older = fill(theirs, "theirs", 4 << 20)
    ours = open_rig(OURS, QUOTA_BYTES)
    batches = fill(ours, "ours", 2 * QUOTA_BYTES)
    stats = ours.tier.stats()
    assert stats["quota_bytes"] == QUOTA_BYTES
    assert occupied_bytes(path / OURS.hex()) <= stats["share_bytes"] <= QUOTA_BYTES
    assert stats["evicted_files"] > 0
    assert "quota_bytes" not in theirs.tier.stats()
    assert found(ours, "ours", 0) == 0
    assert found(ours, "ours", batches - 1) == BATCH
    assert all(found(theirs, "theirs", number) == BATCH for number in range(older))
    assert ours.tier.describe()["quota_bytes"] == QUOTA_BYTES


@pytest.mark.slow
def test_a_quota_holds_for_what_was_stored_before_there_was_one(path: Path, open_rig: OpenRig) -> None:
    first = open_rig(OURS)
    fill(first, "ours", 3 * QUOTA_BYTES)
    assert occupied_bytes(path / OURS.hex()) > 2 * QUOTA_BYTES
    first.tier.shutdown()
    limited = open_rig(OURS, QUOTA_BYTES)
    wait_until(lambda: occupied_bytes(path / OURS.hex()) <= QUOTA_BYTES)
    assert limited.store(make_keys(BATCH, "more")).success
    assert occupied_bytes(path / OURS.hex()) <= QUOTA_BYTES


@pytest.mark.slow
def test_a_quota_holds_though_the_ledger_is_lost_or_knows_nothing_of_the_namespace(
    path: Path, open_rig: OpenRig
) -> None:
    ours = open_rig(OURS, QUOTA_BYTES)
    fill(ours, "ours", QUOTA_BYTES)
    for number in range(4):
        os.truncate(path / LEDGER_NAME, 0)
        fill(ours, f"after-{number}", QUOTA_BYTES // 2)
        assert occupied_bytes(path / OURS.hex()) <= QUOTA_BYTES
    ours.tier.shutdown()
    # Counted while the namespace has no owner, it is not in the ledger any more.
    others = open_rig(THEIRS)
    os.truncate(path / LEDGER_NAME, 0)
    fill(others, "theirs", 1 << 20)
    assert OURS.hex().encode() not in (path / LEDGER_NAME).read_bytes()
    again = open_rig(OURS, QUOTA_BYTES)
    fill(again, "again", 2 * QUOTA_BYTES)
    assert occupied_bytes(path / OURS.hex()) <= QUOTA_BYTES


def test_a_quota_that_cannot_be_kept_is_an_error_that_names_it(path: Path, open_rig: OpenRig) -> None:
    with pytest.raises(ValueError, match="'quota' is a part of 'capacity'"):
        FsSettings(path=str(path), capacity=1 << 20, quota=2 << 20)
    with pytest.raises(ConfigError, match="quota: 65536 bytes are too few for blocks of 65536"):
        open_rig(OURS, 65_536)
    assert not path.exists()


def test_a_purge_of_what_an_earlier_one_left_takes_nothing_off_a_share_that_never_had_it(
    path: Path, open_rig: OpenRig
) -> None:
    rig = open_rig(OURS, QUOTA_BYTES)
    fill(rig, "ours", 1 << 20)
    shards = path / f".{OURS.hex()}.{'0' * 16}.purged" / ("e" * 16) / "aa"
    shards.mkdir(parents=True)
    for number in range(32):
        (shards / f"{number:032x}").write_bytes(bytes(BLOCK_BYTES))
    purged = FsAdministration(FsSettings(path=str(path), capacity=CAPACITY_BYTES)).purge(
        OURS.hex(), time.monotonic() + 60
    )
    assert purged.left == ()
    assert purged.blocks is not None
    assert purged.blocks >= 32
    with Ledger(str(path / LEDGER_NAME), 30.0).locked() as state:
        share_bytes = state.share_bytes(OURS.hex())
        granted_bytes = sum(state.grants.values())
    assert share_bytes is None or share_bytes >= granted_bytes > 0
    # The first stores may find the directory gone, and are lost.
    wait_until(lambda: rig.store(make_keys(BATCH, "first")).success)
    fill(rig, "again", 2 * QUOTA_BYTES)
    assert QUOTA_BYTES // 2 < occupied_bytes(path / OURS.hex()) <= QUOTA_BYTES


def test_a_purge_that_the_file_system_refuses_is_an_error_and_not_tried_until_the_deadline(
    path: Path, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_rig(OURS), "ours", 1 << 20)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rmdir", refuse)
    administration = FsAdministration(FsSettings(path=str(path), capacity=CAPACITY_BYTES))
    with pytest.raises(TierUnavailableError, match="Read-only file system"):
        administration.purge(OURS.hex(), time.monotonic() + 60)
    monkeypatch.undo()
