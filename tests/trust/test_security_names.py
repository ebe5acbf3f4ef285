"""What comes from outside is never part of a path, nor of a name that could mean something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tenants import BucketStorage, MakeStorage, RedisStorage, Storage, Tenant
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.cli import main
from tiered_kv.errors import ConfigError
from tiered_kv.stack import open_stack
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.s3_servers import moto_server

__all__ = ["moto_server", "redis_server"]

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

HASHES = [
    b"../../../../tmp/evil",
    b"/etc/passwd",
    b"..",
    b".",
    b"",
    b"a\0b",
    b"\n",
    b"x\r\nFLUSHALL\r\n",
    b"*1\r\n$8\r\nFLUSHALL\r\n",
    b"%2e%2e%2f",
    b"<Key>&amp;</Key>",
    b"?acl",
    b" ",
    b"\xff\xfe",
    "ünïcode/☃".encode(),
    b"k" * 4096,
    b"/" * 4096,
]
TENANTS = ["../../../tmp/evil", "a\0b", "a\r\nFLUSHALL\r\n", "[a-z]*", "${HOME}", "t" * 1024]
NAMES = {
    "nvme": r"lock|epoch|tiered-kv-nvme\.json|segment-[0-9a-f]{8}-\d{6}\.kv",
    "fs": r"tiered-kv-fs\.json|lock|ledger|sweep|namespace\.json|epoch|[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f]{2}",
    "s3": r"tiered-kv/[0-9a-f]{32}/(namespace\.json|epoch|blocks/[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{32})",
}
KINDS = ("nvme", "fs", "redis", "s3")


def names_in(storage: Storage) -> set[bytes]:
    """Return what things are called in a storage, of paths the last part."""
    if isinstance(storage, RedisStorage):
        return {name for server in storage.servers for name in raw_names(server)}
    if isinstance(storage, BucketStorage):
        client = storage.server.client()
        listed = client.list_objects_v2(Bucket=storage.bucket).get("Contents", ())
        client.close()
        return {entry["Key"].encode() for entry in listed}
    return {path.name.encode() for path in storage.folder.glob("kv*/**/*")}


def raw_names(server: RedisServer) -> list[bytes]:
    """Return the names of values; each as hexadecimal digits on its way, since a name may hold anything."""
    script = (
        "local found = {} for i, k in ipairs(redis.call('KEYS', '*')) do "
        "found[i] = k:gsub('.', function(c) return string.format('%02x', c:byte()) end):gsub('\\n', '0a') end "
        "return table.concat(found, ',')"
    )
    reply = server.call("EVAL", script, "0")
    joined = reply[reply.index(b"\r\n") + 2 : -2].decode()
    return [bytes.fromhex(each) for each in joined.split(",")] if joined else []


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_key_holds_it_is_part_of_no_path_and_means_nothing_to_a_server(
    kind: str, make_storage: MakeStorage, tmp_path: Path
) -> None:
    storage = make_storage(kind)
    tenant = Tenant("alice", storage)
    keys: list[OffloadKey] = [make_offload_key(each, 0) for each in HASHES]
    with open_stack(tenant.file) as stack:
        # nvme keeps no key that is longer than a batch header has room for: that one is a failed store, and counted.
        stored = sum(tenant.put(stack, [key]) for key in keys)
        assert stored >= len(keys) - (2 if kind == "nvme" else 0)
    with open_stack(tenant.file) as stack:
        assert tenant.wrong(stack, keys) == (stored, 0)
        names = names_in(storage)
    if kind == "redis":
        prefix = f"tkv1:{tenant.digest}:".encode()
        blocks = {
            name.removeprefix(prefix)[17:] for name in names if re.match(rb"[0-9a-f]{16}:", name.removeprefix(prefix))
        }
        assert all(name.startswith(prefix) for name in names)
        assert blocks == set(keys), "the key as it is, after a prefix of fixed length, in a protocol with lengths"
        assert len(names) == len(keys) + 2
    else:
        assert {name for name in names if not re.fullmatch(NAMES[kind].encode(), name)} == set()
    assert not Path("/tmp/evil").exists()
    assert {path.name for path in tmp_path.iterdir()} - {"redis"} <= {"kv", "kv-alice", tenant.file.name}


@pytest.mark.parametrize("name", TENANTS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_tenant_is_called_its_name_is_part_of_no_path_and_can_be_purged(
    kind: str, name: str, make_storage: MakeStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = make_storage(kind)
    tenant, other = Tenant(name.replace("$", "$$"), storage), Tenant("alice", storage)
    assert (tenant.store(2), other.store(2)) == (2, 2)
    for found in names_in(storage):
        if kind == "redis":
            assert re.fullmatch(rb"tkv1:[0-9a-f]{32}:(namespace|epoch|[0-9a-f]{16}:.*)", found, re.DOTALL)
        else:
            assert re.fullmatch(NAMES[kind].encode(), found)
    assert main(["purge", str(tenant.file), "--yes", "--json", "--tenant", name]) == 0
    assert '"purged": true' in capsys.readouterr().out
    assert storage.holds(tenant.marker) == []
    assert other.load(2) == (2, 0)


@pytest.mark.parametrize("field", ["model", "revision", "tenant", "layout"])
def test_a_name_of_four_kilobytes_is_refused(field: str, tmp_path: Path) -> None:
    fields = {"model": "m", field: "x" * 4096}
    with pytest.raises(ConfigError, match=f"namespace.{field}"):
        open_stack({"namespace": fields, "block": {"bytes": 4096}, "primary": {"capacity": "64KiB"}})
