"""Tenants on one Redis, each with a user of its own: what the page says of values, and of names."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.tenants import RedisStorage, Tenant
from tiered_kv.testing.redis_servers import RedisServer, redis_server

redis = pytest.importorskip("redis", reason="redis-py is not installed")

__all__ = ["redis_server"]

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

BLOCKS = 4
RIGHTS = ("+get", "+set", "+strlen", "+unlink")
KEY = "5a" * 32


def user_of(server: RedisServer, tenant: Tenant, *rights: str) -> str:
    """Make alice's user as the page recommends; return its URL."""
    pattern = f"~tkv1:{tenant.digest}:*"
    reply = server.call("ACL", "SETUSER", "alice", "reset", "on", ">secret", pattern, *RIGHTS, *rights)
    assert reply == b"+OK\r\n"
    return f"redis://alice:secret@127.0.0.1:{server.port}"


@pytest.mark.parametrize("is_keyed", [False, True])
def test_names_are_seen_by_who_may_scan_and_say_nothing_if_they_are_keyed(
    is_keyed: bool, redis_server: RedisServer, tmp_path: Path
) -> None:
    own: dict[str, object] = {"name_key": KEY} if is_keyed else {}
    bob = Tenant("bob", RedisStorage(tmp_path, [redis_server], url=redis_server.url, **own))
    assert bob.store(BLOCKS) == BLOCKS
    alice = Tenant("alice", RedisStorage(tmp_path, [redis_server], url=redis_server.url))
    with closing(redis.Redis.from_url(user_of(redis_server, alice, "+scan"))) as client:
        seen = list(client.scan_iter(f"tkv1:{bob.digest}:*"))
        told = [key for key in bob.keys(BLOCKS) if any(name.endswith(b":" + bytes(key)) for name in seen)]
        assert len(seen) >= BLOCKS
        assert len(told) == (0 if is_keyed else BLOCKS)
        for name in seen:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.get(name)
    url = user_of(redis_server, alice)
    with closing(redis.Redis.from_url(url)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.scan(match="*")
    # Such a user is enough for a stack.
    assert Tenant("alice", RedisStorage(tmp_path, [redis_server], url=url)).store(BLOCKS) == BLOCKS
