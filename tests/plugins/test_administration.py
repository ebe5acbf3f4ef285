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
from tests.support.places import Place
from tests.support.redis_groups import redis_cluster, redis_sentinel
from tests.support.redis_servers import redis_server
from tests.support.s3_entries import damage_objects
from tiered_kv.hooks import tier_plugins
from tiered_kv.testing.administration import TierAdministrationConformance
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import OpenTier, make_keys
from tiered_kv.testing.s3_servers import moto_server
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.administration import TierAdministration
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.settings import FsSettings

__all__ = ["moto_server", "redis_cluster", "redis_sentinel", "redis_server"]

BLOCK_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
PURGED, OTHER = bytes(range(16)), bytes(range(16, 32))


class TestFsAdministration(TierAdministrationConformance):
    kind: ClassVar[str] = "fs"

    @pytest.fixture
    def place(self, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
        return Place(self.kind, tmp_path, request.getfixturevalue)

    @pytest.fixture
    def open_tier(self, place: Place) -> OpenTier:
        self.storage = place
        entry = {"lookup_timeout": self.wait_s, **place.entry}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)

    @pytest.fixture
    def administration(self, place: Place) -> Iterator[TierAdministration]:
        tier_type = tier_plugins().resolve(str(place.entry["type"]))
        assert tier_type.administration is not None
        settings = tier_type.settings.model_validate({**place.entry, "name": "x"})
        with contextlib.closing(tier_type.administration()(settings)) as administration:
            yield administration

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        for path in self.storage.path.glob("*/*/*/*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        return True


class TestNvmeAdministration(TestFsAdministration):
    kind = "nvme"
    is_shared = False

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        return False  # tests/_cli/test_inspect.py damages segments


class TestRedisAdministration(TestFsAdministration):
    kind = "redis"

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        for master in self.storage.masters:
            master.damage("tkv1:*", HEADER_BYTES)
        return True


@pytest.mark.slow
class TestRedisClusterAdministration(TestRedisAdministration):
    kind = "redis-cluster"


@pytest.mark.slow
class TestRedisSentinelAdministration(TestRedisAdministration):
    kind = "redis-sentinel"


@pytest.mark.slow
class TestS3Administration(TestFsAdministration):
    kind = "s3"

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        damage_objects(self.storage.s3, self.storage.bucket, "/blocks/")
        return True


class TestS3AdministrationOfVersions(TestS3Administration):
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
