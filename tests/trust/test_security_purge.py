"""A purge leaves no byte of a tenant in any tier, disturbs no other process, and deletes no other namespace's data."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_use import occupied_bytes
from tests.support.places import Place, PlaceOf
from tests.support.redis_servers import RedisServer
from tests.support.stacks import manager_of
from tests.support.tenants import Tenant, neighbour
from tiered_kv.cli.main import main
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv_s3.control import Control

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

BLOCKS, FEW = 16, 4
ROUNDS = 4
"""Of a neighbour, which loads again what it stored six rounds before."""
KINDS = ("nvme", "fs", "redis", "redis-cluster", "redis-sentinel", "s3", "s3-versioned")
SHARED = ("fs", "redis", "redis-cluster", "s3-versioned")
WAIT_S = 120.0


Purge = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def purge(capsys: pytest.CaptureFixture[str]) -> Purge:
    """Runs the command with options; returns its status and its report of the tier."""

    def purge(tenant: Tenant, *options: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        status = main(["purge", str(tenant.file), "--yes", "--json", *options])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return status, report["tiers"][0]

    return purge


def two_tenants(storage: Place) -> tuple[Tenant, Tenant]:
    """Return two tenants on one storage, each with `BLOCKS` stored blocks."""
    alice, bob = storage.tenant("alice"), storage.tenant("bob")
    assert (alice.store(BLOCKS), bob.store(BLOCKS)) == (BLOCKS, BLOCKS)
    return alice, bob


@pytest.mark.parametrize("kind", KINDS)
def test_a_purge_leaves_no_byte_of_the_tenant_and_every_block_of_the_other(
    kind: str, place_of: PlaceOf, purge: Purge
) -> None:
    storage = place_of(kind)
    alice, bob = two_tenants(storage)
    if kind == "s3-versioned":
        leave_versions(storage, alice)
    of_alice, before, named = storage.hold(alice.marker, bob.marker, alice.digest.encode())
    assert of_alice
    assert before
    assert named

    status, tier = purge(alice, "--tenant", "alice")

    assert (status, tier["error"], tier["unknown"]) == (0, "", [])
    (found,) = tier["namespaces"]
    assert (found["namespace"], found["tenant"], found["purged"]) == (alice.digest, "alice", True)
    assert found["size_bytes"] >= BLOCKS * 4096
    if kind != "nvme":  # of half of the versioned blocks only older versions are left
        assert found["blocks"] == (BLOCKS // 2 if kind == "s3-versioned" else BLOCKS)
    traces = (alice.marker, b'"alice"', alice.digest.encode())
    *left, after = storage.hold(*traces, bob.marker)
    assert left == [[], [], []]
    assert sorted(after) == sorted(before)  # a server lists its names in any order
    assert bob.load(BLOCKS) == (BLOCKS, 0)
    assert alice.load(BLOCKS) == (0, 0)
    assert alice.store(BLOCKS) == BLOCKS, "the namespace can be used again"
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def leave_versions(storage: Place, tenant: Tenant) -> None:
    """Make older versions of the tenant's blocks: overwritten, and deleted."""
    with closing(storage.s3.client()) as client:
        listed = client.list_objects_v2(Bucket=storage.bucket, Prefix=f"kv/{tenant.digest}/blocks/")["Contents"]
        for name in [entry["Key"] for entry in listed][:8]:
            body = client.get_object(Bucket=storage.bucket, Key=name)["Body"].read()
            client.put_object(Bucket=storage.bucket, Key=name, Body=body)
            client.delete_object(Bucket=storage.bucket, Key=name)


@pytest.mark.parametrize("kind", SHARED)
def test_a_purge_disturbs_no_process_that_uses_the_same_storage(kind: str, place_of: PlaceOf, purge: Purge) -> None:
    storage = place_of(kind)
    alice, bob = storage.tenant("alice"), storage.tenant("bob")
    with neighbour(alice) as purged, neighbour(bob) as other:
        purged.go_on(ROUNDS)
        before = other.go_on(ROUNDS)
        status, tier = purge(alice)
        assert tier["error"] == ""
        assert status == (0 if all(not each["left"] for each in tier["namespaces"]) else 1)
        (found,) = tier["namespaces"]
        assert found["blocks"] > 0
        after = purged.go_on(ROUNDS)
        assert after["wrong"] == 0
        end_s = time.monotonic() + WAIT_S  # so many misses in a row may have opened its breaker
        while purged.go_on(1)["came"] == after["came"]:
            assert time.monotonic() < end_s, "it does not store and load again"
        last = other.go_on(ROUNDS)
        assert last["wrong"] == 0
        assert last["came"] - before["came"] == 16 * (last["rounds"] - before["rounds"]), (
            "no block of the other is lost"
        )
    status, tier = purge(alice)
    assert (status, tier["error"]) == (0, "")
    of_alice, of_bob = storage.hold(alice.marker, bob.marker)
    assert of_alice == []
    assert of_bob


def test_an_nvme_directory_that_is_open_is_not_purged(place_of: PlaceOf, purge: Purge) -> None:
    storage = place_of("nvme")
    alice = storage.tenant("alice")
    with neighbour(alice) as owner:
        owner.go_on(2)
        status, tier = purge(alice)
        assert status == 1
        assert "is in use by process" in tier["error"]
        assert storage.holds(alice.marker)
        owner.go_on(2)


def test_a_directory_of_another_namespace_is_not_touched(place_of: PlaceOf, purge: Purge) -> None:
    storage = place_of("nvme")
    alice, bob = storage.tenant("alice"), storage.tenant("bob")
    bob.store(BLOCKS)
    before = {entry.name: entry.read_bytes() for entry in bob.path.iterdir()}
    alice.file.write_text(alice.file.read_text().replace(str(alice.path), str(bob.path)))
    status, tier = purge(alice, "--tenant", "alice")
    assert (status, tier["namespaces"], tier["error"]) == (0, [], "")
    assert {entry.name: entry.read_bytes() for entry in bob.path.iterdir()} == before


@pytest.mark.parametrize("where", ["nvme", "fs", "fs namespace"])
def test_other_files_stay_and_are_reported_where_they_may_be_copies_of_blocks(
    where: str, place_of: PlaceOf, purge: Purge, tmp_path: Path
) -> None:
    """An nvme directory is one namespace's, and so is a namespace's in one of fs, which is many's."""
    storage = place_of(where.partition(" ")[0])
    alice = storage.tenant("alice")
    alice.store(BLOCKS)
    folder = alice.path / (alice.digest if where == "fs namespace" else "")
    (folder / "notes.txt").write_text("mine")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / ("0" * 32)).write_bytes(b"precious")
    (folder / ("e" * 16)).symlink_to(victim)
    status, tier = purge(alice)
    told = " ".join(tier["namespaces"][0]["left"])
    assert (status, "notes.txt, which is not this tier's" in told) == ((0, False) if where == "fs" else (1, True))
    assert [path.read_text() for path in alice.path.rglob("notes.txt")] == ["mine"]
    assert (victim / ("0" * 32)).read_bytes() == b"precious"
    assert storage.holds(alice.marker) == []


def test_what_a_killed_purge_or_a_killed_writer_left_is_purged(place_of: PlaceOf, purge: Purge, tmp_path: Path) -> None:
    storage = place_of("fs")
    alice, bob = two_tenants(storage)
    directory = tmp_path / "kv"
    block = next((directory / alice.digest).glob("*/*/*"))
    shutil.copy(block, block.with_name(f".{block.name}.{'a' * 16}.7.tmp"))
    block.unlink()
    assert storage.holds(alice.marker)
    assert bob.load(BLOCKS) == (BLOCKS, 0)
    status, tier = purge(alice, "--tenant", "alice")
    assert (status, tier["namespaces"][0]["blocks"]) == (0, BLOCKS - 1)
    assert storage.holds(alice.marker) == []


def test_the_ledger_gets_back_what_a_purge_has_freed(place_of: PlaceOf, purge: Purge, tmp_path: Path) -> None:
    alice, _ = two_tenants(place_of("fs"))
    ledger = tmp_path / "kv" / "ledger"
    before = json.loads(ledger.read_bytes())["total_bytes"]
    _, tier = purge(alice)
    after = json.loads(ledger.read_bytes())["total_bytes"]
    assert after == before - tier["namespaces"][0]["size_bytes"] >= occupied_bytes(tmp_path / "kv")


def test_a_readable_form_that_names_another_tenant_is_refused(place_of: PlaceOf, purge: Purge, tmp_path: Path) -> None:
    storage = place_of("fs")
    alice, bob = two_tenants(storage)
    readable = tmp_path / "kv" / bob.digest / "namespace.json"
    readable.write_bytes(readable.read_bytes().replace(b'"bob"', b'"alice"'))
    status, tier = purge(alice, "--tenant", "alice")
    assert (status, tier["unknown"]) == (1, [bob.digest])
    assert [each["namespace"] for each in tier["namespaces"]] == [alice.digest]
    assert storage.holds(alice.marker) == []
    assert bob.load(BLOCKS) == (BLOCKS, 0)


def test_an_epoch_survives_a_purge_as_a_new_one_so_that_nothing_from_before_a_reset_is_joined(
    place_of: PlaceOf, purge: Purge
) -> None:
    storage = place_of("s3-versioned")
    alice = storage.tenant("alice")
    with open_stack(alice.file) as never_reset:
        alice.put(never_reset, alice.keys(4))
        with open_stack(alice.file) as stack:
            manager_of(stack).reset_cache()
            alice.put(stack, alice.keys(4, 4))
        purge(alice)
        alice.put(never_reset, alice.keys(4, 100))  # of old weights, for all that is known
        assert alice.load(4, 100) == (0, 0)
        wait_until(lambda: not never_reset.counters()["s3"]["jobs_in_flight"])
    assert [name for name in storage.holds(b"tiered-kv epoch 1") if "epoch" in name]


@pytest.mark.parametrize("kind", ["s3", "s3-versioned"])
def test_a_purge_keeps_the_mark_that_a_reset_writes_while_it_runs(
    kind: str, place_of: PlaceOf, purge: Purge, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(kind)
    alice = place.tenant("alice")
    root = f"kv/{alice.digest}/"
    block = f"{root}blocks/{'0' * 16}/ab/ab{'0' * 30}"
    with closing(place.s3.client()) as client:
        for name in (f"{root}namespace.json", block, block):
            client.put_object(Bucket=place.bucket, Key=name, Body=b"block")
        delete = Control.delete_versions

        def delete_late(self: Control, objects: Sequence[Mapping[str, str]]) -> dict[int, str]:
            if f"{root}epoch" not in place.stored():
                client.put_object(Bucket=place.bucket, Key=f"{root}epoch", Body=b"new")
            return delete(self, objects)

        monkeypatch.setattr(Control, "delete_versions", delete_late)
        status, tier = purge(alice)
    assert [(name, data) for name, _, data in place.everything()] == [(f"{root}epoch", b"new")]
    (found,) = tier["namespaces"]
    assert (status, found["blocks"], found["left"]) == (0, 1, [])


# Names that only begin like the namespace's.


def test_names_in_redis_that_others_put_beside_or_among_the_namespace_s_stay(
    redis_server: RedisServer, place_of: PlaceOf, purge: Purge
) -> None:
    alice = place_of("redis").tenant("alice")
    alice.store(FEW)
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
    status, tier = purge(alice)
    (found,) = tier["namespaces"]
    assert sorted(redis_server.keys("*")) == sorted(name.encode() for name in (*among, *beside))
    assert (status, found["blocks"]) == (1, FEW + 1)
    assert len(found["left"]) == len(among)
    assert main(["purge", str(alice.file), "--yes"]) == 0, "nothing of this tool is stored any more"


def test_prefixes_of_a_bucket_that_begin_alike_are_apart(place_of: PlaceOf) -> None:
    place = place_of("s3")
    tenants = {prefix: place.tenant("alice", prefix=prefix) for prefix in ("prod", "prod2", "prod/x")}
    assert [tenant.store(FEW) for tenant in tenants.values()] == [FEW] * 3
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
    assert tenants["prod2"].load(FEW) == tenants["prod/x"].load(FEW) == (FEW, 0)


def test_a_bucket_s_objects_that_others_put_under_the_namespace_s_names_stay_and_are_told(
    place_of: PlaceOf, purge: Purge
) -> None:
    place = place_of("s3-versioned")
    alice = place.tenant("alice", capacity="64MiB")
    client = place.s3.client()
    assert alice.store(FEW) == FEW
    with open_stack(alice.file) as stack:
        manager_of(stack).reset_cache()
        alice.put(stack, alice.keys(FEW))
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
    client.delete_object(Bucket=place.bucket, Key=foreign[0])  # leaves its older versions

    client.close()

    def versions() -> list[tuple[str, bytes]]:
        return sorted((name, data) for name, _, data in place.everything() if data is not None)

    before = [each for each in versions() if each[0] in foreign]
    status, tier = purge(alice)
    (found,) = tier["namespaces"]
    after = versions()
    assert len(before) == 2 * len(foreign)
    assert [each for each in after if each[0] in foreign] == before
    assert {name for name, _ in after} == {*foreign, f"{root}epoch"}, "all objects of this tool are gone"
    assert place.holds(alice.marker) == []
    assert (status, found["purged"], found["blocks"]) == (1, False, 2 * FEW)
    assert found["left"][-1] == f"{2 * len(foreign) + 1 - 8} more such entries"
    assert main(["purge", str(alice.file), "--yes"]) == 0, "nothing of this tool is stored any more"
