"""A purge takes what is the namespace's, and nothing whose name only begins like it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiered_kv.cli import main
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv.testing.tenants import BucketStorage, RedisStorage, Tenant

__all__ = ["moto_bucket", "moto_server", "redis_server"]

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

BLOCKS = 4


def test_names_in_redis_that_only_look_alike_stay(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alice = Tenant("alice", RedisStorage(tmp_path, [redis_server], url=redis_server.url))
    alice.store(BLOCKS)
    own = alice.digest
    another = own[:-1] + ("1" if own[-1] == "0" else "0")
    foreign = [
        f"tkv1:{another}:{'0' * 16}:key", f"tkv1:{own}", f"tkv1:{own}x:key", f"xtkv1:{own}:key", f"tkv12:{own}:key",
        f"tkv1:{'?' * 32}:key", "tkv1:*:key", f"tkv1:[{own}]:key", f"tkv1:{another}\n{own}:key", own,
    ]  # fmt: skip
    for name in foreign:
        redis_server.set(name.encode(), b"precious")
    assert main(["purge", str(alice.file), "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"][0]["namespaces"][0]["blocks"] == BLOCKS
    assert sorted(redis_server.keys("*")) == sorted(name.encode() for name in foreign)


def test_prefixes_of_a_bucket_that_begin_alike_are_apart(
    moto_server: S3Server, moto_bucket: str, tmp_path: Path
) -> None:
    tenants = {}
    for prefix in ("prod", "prod2", "prod/x"):
        folder = tmp_path / prefix.replace("/", "-")
        folder.mkdir()
        tenants[prefix] = Tenant("alice", BucketStorage(folder, moto_server, moto_bucket, prefix=prefix))
        assert tenants[prefix].store(BLOCKS) == BLOCKS
    alice = tenants["prod"]
    client = moto_server.client()
    foreign = ["prod", "prod/notes.txt", f"prod/{alice.digest}", f"prod/{alice.digest}2/notes.txt"]
    for name in foreign:
        client.put_object(Bucket=moto_bucket, Key=name, Body=b"precious")
    assert main(["purge", str(alice.file), "--yes", "--tenant", "alice"]) == 0
    left = [entry["Key"] for entry in client.list_objects_v2(Bucket=moto_bucket)["Contents"]]
    client.close()
    assert [name for name in left if name.startswith(f"prod/{alice.digest}/")] == []
    assert set(foreign) <= set(left)
    assert tenants["prod2"].load(BLOCKS) == tenants["prod/x"].load(BLOCKS) == (BLOCKS, 0)
