"""A purge takes what is the namespace's, and nothing whose name only begins like it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.places import PlaceOf
from tests.support.tenants import Tenant
from tiered_kv.cli import main
from tiered_kv.stack import open_stack
from tiered_kv.testing.redis_servers import RedisServer

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

BLOCKS = 4


def purged(tenant: Tenant, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Purge a tenant's namespace; return the command's status, and what it says of the namespace."""
    status = main(["purge", str(tenant.file), "--yes", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["tiers"][0]["namespaces"]
    return status, found


def test_names_in_redis_that_others_put_beside_or_among_the_namespace_s_stay(
    redis_server: RedisServer, place_of: PlaceOf, capsys: pytest.CaptureFixture[str]
) -> None:
    alice = place_of("redis").tenant("alice")
    alice.store(BLOCKS)
    own, another = alice.digest, "f" * 32
    ours = f"tkv1:{own}:"
    redis_server.set(f"{ours}{'a' * 16}:".encode() + b"any\nbytes", b"a block")
    among = [
        f"{ours}notes", f"{ours}epoch2", f"{ours}epoch\n", f"{ours}", f"{ours}{'a' * 16}",
        f"{ours}{'A' * 16}:key", f"{ours}{'a' * 17}:key", f"{ours}x:namespace",
    ]  # fmt: skip
    beside = [
        f"tkv1:{another}:{'0' * 16}:key", f"tkv1:{own}", f"tkv1:{own}x:key", f"xtkv1:{own}:key", f"tkv12:{own}:key",
        f"tkv1:{'?' * 32}:key", "tkv1:*:key", f"tkv1:[{own}]:key", f"tkv1:{another}\n{own}:key", own,
    ]  # fmt: skip
    for name in (*among, *beside):
        redis_server.set(name.encode(), b"precious")
    status, found = purged(alice, capsys)
    assert sorted(redis_server.keys("*")) == sorted(name.encode() for name in (*among, *beside))
    assert (status, found["blocks"]) == (1, BLOCKS + 1)
    assert found["left"] == [f"{len(among)} names that are not of this tool were left"]
    assert main(["purge", str(alice.file), "--yes"]) == 0, "nothing of this tool is stored any more"


def test_prefixes_of_a_bucket_that_begin_alike_are_apart(place_of: PlaceOf) -> None:
    place = place_of("s3")
    tenants = {prefix: place.tenant("alice", prefix=prefix) for prefix in ("prod", "prod2", "prod/x")}
    assert [tenant.store(BLOCKS) for tenant in tenants.values()] == [BLOCKS] * 3
    alice = tenants["prod"]
    client = place.s3.client()
    foreign = ["prod", "prod/notes.txt", f"prod/{alice.digest}", f"prod/{alice.digest}2/notes.txt"]
    for name in foreign:
        client.put_object(Bucket=place.bucket, Key=name, Body=b"precious")
    assert main(["purge", str(alice.file), "--yes", "--tenant", "alice"]) == 0
    left = [entry["Key"] for entry in client.list_objects_v2(Bucket=place.bucket)["Contents"]]
    client.close()
    assert [name for name in left if name.startswith(f"prod/{alice.digest}/")] == []
    assert set(foreign) <= set(left)
    assert tenants["prod2"].load(BLOCKS) == tenants["prod/x"].load(BLOCKS) == (BLOCKS, 0)


def test_a_bucket_s_objects_that_others_put_under_the_namespace_s_names_stay_and_are_told(
    place_of: PlaceOf, capsys: pytest.CaptureFixture[str]
) -> None:
    place = place_of("s3-versioned")
    alice = place.tenant("alice", capacity="64MiB")
    client = place.s3.client()
    assert alice.store(BLOCKS) == BLOCKS
    with open_stack(alice.file) as stack:
        stack.manager.reset_cache()
        alice.put(stack, alice.keys(BLOCKS))
    root = f"kv/{alice.digest}/"
    key = "ab" + "0" * 30
    foreign = [f"{root}{name}" for name in (
        "notes.txt", "namespace.json.bak", "epoch/old", "epochs", f"blocks/{key}", f"blocks/{'0' * 16}/ab/{key}.bak",
        f"blocks/{'0' * 16}/cd/{key}", f"blocks/{'0' * 16}/ab/{key.upper()}", "grants/notes.txt",
        f"grants/{'0' * 16}-1-60-old", f"grants/{'0' * 16}-1-{chr(0x0663)}", "more/blocks", "<&> and \"",
    )]  # fmt: skip
    for name in foreign:
        for body in (b"precious", b"more precious"):
            client.put_object(Bucket=place.bucket, Key=name, Body=body)
    client.delete_object(Bucket=place.bucket, Key=foreign[0])  # its older versions are somebody's all the same

    client.close()

    def versions() -> list[tuple[str, bytes]]:
        return sorted((name, data) for name, _, data in place.everything() if data is not None)

    before = [each for each in versions() if each[0] in foreign]
    status, found = purged(alice, capsys)
    after = versions()
    assert len(before) == 2 * len(foreign)
    assert [each for each in after if each[0] in foreign] == before
    assert {name for name, _ in after} == {*foreign, f"{root}epoch"}, "whatever was this tool's is gone"
    assert place.holds(alice.marker) == []
    assert (status, found["purged"], found["blocks"]) == (1, False, 2 * BLOCKS)
    assert found["left"] == [f"{len(foreign)} objects that are not of this tool were left"]
    assert main(["purge", str(alice.file), "--yes"]) == 0, "nothing of this tool is stored any more"
