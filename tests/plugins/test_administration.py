"""The administrations of the built-in tiers keep their contract; and a purge of a directory of killed processes."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.disk_use import fs_ledger, occupied_bytes
from tests.support.entries import rig_of
from tests.support.places import Place, PlaceOf
from tiered_kv.testing.administration import BLOCKS, TierAdministrationConformance
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.administration import TierAdministration
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.settings import FsSettings

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
PURGED, OTHER = bytes(range(16)), bytes(range(16, 32))


class TestFsAdministration(TierAdministrationConformance):
    kind: ClassVar[str] = "fs"

    @pytest.fixture
    def place(self, place_of: PlaceOf) -> Place:
        return place_of(self.kind)

    @pytest.fixture
    def open_tier(self, place: Place) -> OpenTier:
        self.storage = place
        return place.opener()

    @pytest.fixture
    def administration(self, place: Place) -> Iterator[TierAdministration]:
        with contextlib.closing(place.administration()) as administration:
            yield administration

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        self.storage.damage(tier)
        return True

    def test_damaged_blocks_and_the_storage_are_named(self, alice: TierRig, administration: TierAdministration) -> None:
        assert administration.where
        if not self.corrupt(alice.tier):
            return
        named = self.verified(administration, alice).named
        assert len({each.name for each in named}) == BLOCKS
        assert {bool(each.key) for each in named} == {self.kind.startswith("redis")}, "fs and s3 store only digests"


class TestNvmeAdministration(TestFsAdministration):
    kind = "nvme"
    is_shared = False

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        return False  # tests/cli/test_inspect.py damages segments


class TestRedisAdministration(TestFsAdministration):
    kind = "redis"


@pytest.mark.slow
class TestRedisClusterAdministration(TestFsAdministration):
    kind = "redis-cluster"


@pytest.mark.slow
class TestRedisSentinelAdministration(TestFsAdministration):
    kind = "redis-sentinel"


@pytest.mark.slow
class TestS3Administration(TestFsAdministration):
    kind = "s3"


class TestGcsAdministration(TestFsAdministration):
    kind = "gcs"


class TestAzureAdministration(TestFsAdministration):
    kind = "azure"


class TestS3AdministrationOfVersions(TestFsAdministration):
    kind = "s3-versioned"


def test_a_purge_removes_a_killed_process_from_the_ledger_with_its_grant(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    entry = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": CAPACITY_BYTES}
    with contextlib.ExitStack() as running:
        for namespace in (PURGED, OTHER):
            rig = running.enter_context(contextlib.closing(rig_of(entry, block_bytes=BLOCK_BYTES, namespace=namespace)))
            assert rig.store(make_keys(1)).success
        shutil.copytree(tmp_path / "kv", path)  # as killed processes leave it
    assert len(fs_ledger(path)["holders"]) == 2

    administration = FsAdministration(FsSettings(path=str(path), capacity=CAPACITY_BYTES))
    purged = administration.purge(PURGED.hex(), time.monotonic() + 60)
    assert (purged.blocks, purged.left) == (1, ())
    assert [each for each in path.rglob("*") if each.is_file() and PURGED.hex().encode() in each.read_bytes()] == []
    (other,) = fs_ledger(path)["holders"].values()
    assert other["namespace"] == OTHER.hex()

    entry["path"] = str(path)
    with contextlib.closing(rig_of(entry, block_bytes=BLOCK_BYTES, namespace=OTHER)) as rig:
        assert not rig.lookup(make_keys(2)[1])
        wait_until(lambda: rig.tier.stats()["surveys_total"])
        granted = sum(holder["granted_bytes"] for holder in fs_ledger(path)["holders"].values())
        assert occupied_bytes(path) <= fs_ledger(path)["total_bytes"] <= occupied_bytes(path) + granted + (128 << 10)
