"""The blocks that a store sends to a server, and the values that it keeps."""

from __future__ import annotations

import pytest

from tests.plugins.conftest import OpenRedis, block_names, calls
from tests.support.redis_servers import RedisServer, redis_server
from tiered_kv.testing.rig import make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

__all__ = ["redis_server"]


def values(server: RedisServer) -> dict[bytes, bytes]:
    return {name: server.get(name) for name in block_names(server)}


def test_present_blocks_are_kept_and_the_next_store_asks_first(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    rig = open_redis(url=redis_server.url)
    keys = make_keys(8)
    asked = calls(redis_server, "strlen")
    assert rig.store(keys).success
    assert calls(redis_server, "strlen") == asked, "new blocks cost a question"
    marked = {name: value[:-1] + b"\x00" for name, value in values(redis_server).items()}
    for name, value in marked.items():
        redis_server.set(name, value)
    assert rig.store(keys).success
    sent = calls(redis_server, "set")
    assert rig.store(keys).success
    assert calls(redis_server, "set") == sent, "present blocks were sent again"
    assert values(redis_server) == marked, "present blocks were replaced"
    assert rig.tier.stats()["present_blocks_total"] == 16
    fresh = make_keys(8, "fresh")
    asked = calls(redis_server, "strlen")
    assert rig.store(fresh).success
    assert calls(redis_server, "strlen") == asked + 8
    assert rig.store(make_keys(8, "fresher")).success
    assert calls(redis_server, "strlen") == asked + 8, "it still asks after a store of new blocks"
    assert rig.load(fresh) == set(fresh)


def test_a_store_finds_its_time_to_live_unprolonged(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    open_redis(url=redis_server.url).store(make_keys(4))
    assert open_redis(url=redis_server.url, ttl="1h").store(make_keys(8)).success
    lifetimes = [int(redis_server.call("PTTL", name)[1:]) for name in values(redis_server)]
    assert sorted(lifetime == -1 for lifetime in lifetimes) == [False] * 4 + [True] * 4


@pytest.mark.parametrize("damaged", [b"", b"x", b"y" * 20_000])
def test_what_cannot_be_a_block_is_replaced_by_the_store_that_finds_it(
    redis_server: RedisServer, open_redis: OpenRedis, damaged: bytes
) -> None:
    rig = open_redis(url=redis_server.url)
    keys = make_keys(8)
    rig.store(keys)
    stored = values(redis_server)
    for name in sorted(stored)[2:5]:
        redis_server.set(name, damaged)
    assert rig.store(keys).success
    assert values(redis_server) == stored
