"""Damaged records that the storage does not let this process delete: not offered again, and replaced all the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.doors import Door, FsDoor, RedisDoor, S3Door
from tiered_kv.counters import count_of
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.s3_servers import S3Server, missing_for_moto, moto_server
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

__all__ = ["moto_server", "redis_server"]

BLOCK_BYTES = 4096
SPEC = TierSpec("undeletable", BLOCK_BYTES, bytes(range(16)), {"model": "undeletable"})
USER, PASSWORD = "may-not-delete", "to-be-seen"

OpenRig = Callable[[dict[str, object]], TierRig]


@pytest.fixture
def open_rig(request: pytest.FixtureRequest) -> OpenRig:
    def open_it(entry: dict[str, object]) -> TierRig:
        rig = TierRig(
            lambda spec, view: SecondaryTierFactory.create(spec, view, {**entry, "lookup_timeout": "60s"}),
            num_blocks=16,
            block_bytes=BLOCK_BYTES,
            wait_s=60.0,
            spec=SPEC,
        )
        request.addfinalizer(rig.close)
        return rig

    return open_it


def check(rig: TierRig, door: Door) -> None:
    (key,) = make_keys(1, "undeletable")
    rig.store([key])
    stored = door.read(key)
    assert stored is not None
    damaged = stored[:500] + bytes([stored[500] ^ 1]) + stored[501:]
    door.write(key, damaged)
    assert rig.lookup_all([key]) == [True]  # nobody has looked into it yet
    assert not rig.load([key])
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1
    assert door.read(key) == damaged, "it was deleted, and this test is about nothing"
    assert rig.lookup_all([key]) == [False]
    assert rig.store([key]).success
    assert door.read(key) != damaged
    assert rig.lookup_all([key]) == [True]
    assert rig.load([key]) == {key}
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1


def test_fs(tmp_path: Path, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink(path: str, **options: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    monkeypatch.setattr(os, "unlink", unlink)
    rig = open_rig({"type": "fs", "path": str(tmp_path / "kv"), "capacity": "64MiB"})
    check(rig, FsDoor(tmp_path / "kv", SPEC.namespace_digest))


def test_redis(redis_server: RedisServer, open_rig: OpenRig, request: pytest.FixtureRequest) -> None:
    redis_server.call("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", "~*", "+@all", "-unlink", "-del")
    request.addfinalizer(lambda: redis_server.call("ACL", "DELUSER", USER))
    rig = open_rig({"type": "redis", "url": redis_server.url, "username": USER, "password": PASSWORD})
    check(rig, RedisDoor(redis_server, SPEC.namespace_digest))


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_moto()), reason=missing_for_moto() or "moto is there")
@pytest.mark.parametrize("presence_ttl", [0, 60])
def test_s3(
    presence_ttl: int, moto_server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiered_kv_s3.bucket import Bucket
    from tiered_kv_s3.verdict import Verdict

    monkeypatch.setattr(Bucket, "delete", lambda self, name, deadline: Verdict.DENIED)
    bucket = moto_server.make_bucket()
    rig = request.getfixturevalue("open_rig")(moto_server.settings(bucket, prefix="kv", presence_ttl=presence_ttl))
    door = S3Door(moto_server, bucket, "kv", SPEC.namespace_digest)
    request.addfinalizer(door.close)
    check(rig, door)
