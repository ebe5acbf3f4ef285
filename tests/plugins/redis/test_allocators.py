"""What a block takes of a server's memory, by the allocator: as servers said it by `MEMORY USAGE`."""

from __future__ import annotations

import re

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.redis_servers import RedisServer
from tiered_kv.config.validation import validate
from tiered_kv.errors import ConfigError
from tiered_kv.testing.control import ManualClock

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis import node
from tiered_kv_redis.allocators import room_bytes
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.simulation import RedisKeys

KIB = 1 << 10
BESIDE_BYTES_MAX = 200
"""Of the name and what the server keeps beside a value."""
SAID = {
    "libc": {1152: 1264, 8320: 8432, 32896: 33008, 65664: 65792, 131200: 131328, 262272: 262400, 2097280: 2101336},
    "jemalloc-5.3.0": {1152: 1416, 16512: 20616, 32896: 41096, 65664: 82056, 200128: 229512, 1048704: 1310856},
    "jemalloc-5.3.1": {1152: 1416, 8320: 10376, 16512: 20616, 32896: 37000, 65664: 69768, 200128: 200840},
}
"""By allocator, what Redis 7.0, Redis 8.0 and Valkey 7.2 take for a value of some bytes, with a name of 82 bytes."""


@pytest.mark.parametrize("allocator", SAID)
def test_a_value_takes_what_servers_with_the_allocator_say(allocator: str) -> None:
    for value_bytes, said_bytes in SAID[allocator].items():
        room = room_bytes(value_bytes, allocator)
        assert room is not None
        assert -0.003 * said_bytes <= said_bytes - room <= BESIDE_BYTES_MAX + 0.003 * said_bytes


def test_an_allocator_that_nobody_knows_is_not_guessed() -> None:
    assert room_bytes(64 * KIB, "tcmalloc-2.10") is None
    with pytest.raises(ConfigError, match="allocator"):
        validate(RedisSettings, {"type": "redis", "url": "redis://localhost", "allocator": "tcmalloc-2.10"})


def test_a_simulated_server_has_the_allocator_of_the_settings() -> None:
    rooms = {}
    for allocator in (None, *SAID):
        settings = RedisSettings(name="redis", url="redis://localhost", allocator=allocator)
        rooms[allocator] = RedisKeys(settings, 64 * KIB, ManualClock()).record_bytes
    assert rooms == {
        None: 80 * KIB,
        "libc": 64 * KIB + 128,
        "jemalloc-5.3.0": 80 * KIB,
        "jemalloc-5.3.1": 68 * KIB,
    }


def test_describe_says_what_a_block_takes_and_how_many_there_may_be(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    redis_server.call("CONFIG", "SET", "maxmemory", "64mb", "maxmemory-policy", "allkeys-lru")
    (allocator,) = re.findall(r"mem_allocator:(\S+)", redis_server.call("INFO", "memory").decode())
    described = open_redis(url=redis_server.url, block_bytes=64 * KIB, allocator=allocator).tier.describe()
    assert described["allocator"] == allocator
    assert "warning" not in described
    if allocator in SAID:
        assert described["block_room_bytes"] == pytest.approx(SAID[allocator][65664], rel=0.004)
        assert described["blocks_max"] == pytest.approx((64 << 20) / SAID[allocator][65664], rel=0.004)


@pytest.mark.parametrize("said", ["jemalloc-5.3.1", "tcmalloc-2.10"])
def test_describe_warns_of_another_allocator_than_the_settings_name(
    redis_server: RedisServer, open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    memory = node.ServerMemory(64 << 20, "allkeys-lru", said)
    monkeypatch.setattr(node.Node, "memory", lambda _: memory)
    described = open_redis(url=redis_server.url, block_bytes=64 * KIB, allocator="jemalloc-5.3.0").tier.describe()
    assert f"'allocator' is jemalloc-5.3.0, and the server's is {said}" in str(described["warning"])
    assert ("blocks_max" in described) == (said == "jemalloc-5.3.1")
