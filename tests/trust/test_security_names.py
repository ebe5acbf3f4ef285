"""No input becomes part of a path, nor of a name with another meaning."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.places import PlaceOf
from tests.support.redis_servers import RedisServer
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.cli.main import main
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import open_stack

redis = pytest.importorskip("redis", reason="redis-py is not installed")

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

HASHES = [
    b"../../../../tmp/evil",
    b"/etc/passwd",
    b"..",
    b".",
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
    "s3": r"kv/[0-9a-f]{32}/(namespace\.json|epoch|blocks/[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{32})",
}
KINDS = ("nvme", "fs", "redis", "s3")


@pytest.mark.parametrize("kind", KINDS)
def test_no_key_is_part_of_a_path_or_taken_for_a_command(kind: str, place_of: PlaceOf, tmp_path: Path) -> None:
    storage = place_of(kind)
    tenant = storage.tenant("alice")
    keys: list[OffloadKey] = [make_offload_key(each, 0) for each in HASHES]
    with open_stack(tenant.file) as stack:
        # nvme keeps no key that is longer than a batch header has room for: that one is a failed store, and counted.
        stored = sum(tenant.put(stack, [key]) for key in keys)
        assert stored >= len(keys) - (2 if kind == "nvme" else 0)
    with open_stack(tenant.file) as stack:
        assert tenant.wrong(stack, keys) == (stored, 0)
        names = {raw for _, raw, _ in storage.everything()}
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
def test_no_tenant_s_name_is_part_of_a_path_and_every_tenant_can_be_purged(
    kind: str, name: str, place_of: PlaceOf, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = place_of(kind)
    tenant, other = storage.tenant(name.replace("$", "$$")), storage.tenant("alice")
    assert (tenant.store(2), other.store(2)) == (2, 2)
    for _, found, _ in storage.everything():
        if kind == "redis":
            assert re.fullmatch(rb"tkv1:[0-9a-f]{32}:(namespace|epoch|[0-9a-f]{16}:.*)", found, re.DOTALL)
        else:
            assert re.fullmatch(NAMES[kind].encode(), found)
    assert main(["purge", str(tenant.file), "--yes", "--json", "--tenant", name]) == 0
    assert '"purged": true' in capsys.readouterr().out
    assert storage.holds(tenant.marker) == []
    assert other.load(2) == (2, 0)


RIGHTS = ("+get", "+set", "+strlen", "+unlink")


def test_users_who_may_scan_redis_see_names_and_keys_but_read_nothing(
    place_of: PlaceOf, redis_server: RedisServer
) -> None:
    """As `docs/reference/redis.md` describes tenants on one server, each with its own user."""
    place = place_of("redis")
    bob, alice = place.tenant("bob"), place.tenant("alice")
    assert bob.store(4) == 4
    url = f"redis://alice:secret@127.0.0.1:{redis_server.port}"
    user = ("ACL", "SETUSER", "alice", "reset", "on", ">secret", f"~tkv1:{alice.digest}:*", *RIGHTS)
    assert redis_server.call(*user, "+scan") == b"+OK\r\n"
    with closing(redis.Redis.from_url(url)) as client:
        seen = list(client.scan_iter(f"tkv1:{bob.digest}:*"))
        told = [key for key in bob.keys(4) if any(name.endswith(b":" + bytes(key)) for name in seen)]
        assert len(seen) >= 4
        assert len(told) == 4
        for name in seen:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.get(name)
    assert redis_server.call(*user) == b"+OK\r\n"
    with closing(redis.Redis.from_url(url)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.scan(match="*")
    assert place.tenant("alice", url=url).store(4) == 4, "such a user is not enough for a stack"


@pytest.mark.parametrize("field", ["model", "revision", "tenant", "layout"])
def test_a_name_of_four_kilobytes_is_refused(field: str, tmp_path: Path) -> None:
    fields = {"model": "m", field: "x" * 4096}
    with pytest.raises(ConfigError, match=f"namespace.{field}"):
        open_stack({"namespace": fields, "block": {"bytes": 4096}, "primary": {"capacity": "64KiB"}})
