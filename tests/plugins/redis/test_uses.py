"""Uses in a tier above reach the server: blocks in use outlive their `ttl`, and missing ones are reported."""

from __future__ import annotations

import types

import pytest

from tests.plugins.conftest import OpenRedis, block_names
from tests.support.redis_servers import RedisServer
from tiered_kv.base import OffloadKey
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys


def lifetimes_ms(server: RedisServer) -> list[int]:
    return [int(server.call("PTTL", name)[1:]) for name in block_names(server)]


def touched(rig: TierRig, keys: list[OffloadKey]) -> list[OffloadKey]:
    """Touch blocks until the tier reports absent ones, and return these."""
    absent: list[OffloadKey] = []

    def is_reported() -> bool:
        rig.tier.touch(keys, rig.new_request())
        absent.extend(rig.tier.take_absent())
        return bool(absent)

    wait_until(is_reported)
    return absent


def test_a_use_begins_the_time_to_live_anew(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    keys = make_keys(4)
    open_redis(url=redis_server.url, ttl="100s").store(keys)
    rig = open_redis(url=redis_server.url, ttl="1h")
    rig.tier.touch(keys, rig.new_request())
    wait_until(lambda: min(lifetimes_ms(redis_server)) > 3_000_000)


def test_a_use_begins_the_time_to_live_anew_again_and_again(
    redis_server: RedisServer, open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("tiered_kv.toolkit.touches.time", clock)
    keys = make_keys(4)
    rig = open_redis(url=redis_server.url, ttl="1h")
    rig.store(keys)
    for _ in range(3):  # a server that turns over within half a minute evicts what was used before that
        for name in block_names(redis_server):
            redis_server.call("PEXPIRE", name, "100000")
        now_s += 10.0
        rig.tier.touch(keys, rig.new_request())
        wait_until(lambda: min(lifetimes_ms(redis_server)) > 3_000_000)


def mark_name(server: RedisServer) -> bytes:
    return next(name for name in server.call("KEYS", "tkv1:*:epoch").split() if name.endswith(b":epoch"))


@pytest.mark.parametrize("use", ["store", "touch", "close"])
def test_a_mark_that_the_server_has_evicted_is_back_before_a_restart(
    redis_server: RedisServer, open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    monkeypatch.setattr("tiered_kv.toolkit.epoch.CHECK_PAUSE_S", 1e9)  # no load and no lookup looks at it
    keys = make_keys(4)
    rig = open_redis(url=redis_server.url)
    rig.store(keys)
    name = mark_name(redis_server)
    mark = redis_server.call("GET", name)
    redis_server.call("UNLINK", name)
    numbers = iter(range(1_000_000))

    def is_back() -> bool:
        if use == "store":
            rig.store(make_keys(1, f"more{next(numbers)}"))
        elif use == "touch":
            rig.tier.touch(make_keys(1, f"more{next(numbers)}"), rig.new_request())
        else:
            rig.tier.shutdown()
        return redis_server.call("GET", name) == mark

    wait_until(is_back)


def test_a_touched_block_that_the_server_has_evicted_is_reported_as_absent(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    for number, settings in enumerate([dict[str, str](), {"ttl": "1h"}]):
        keys = make_keys(4, f"blocks{number}")
        rig = open_redis(url=redis_server.url, **settings)
        rig.store(keys[:3])
        assert touched(rig, keys) == keys[3:]


def test_without_the_right_to_renew_a_use_is_still_noted(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    commands = ("+get", "+set", "+strlen", "+unlink", "+ping", "+info", "+hello", "+client")
    redis_server.call("ACL", "SETUSER", "limited", "on", ">word", "~tkv1:*", *commands)
    keys = make_keys(4)
    rig = open_redis(url=redis_server.url, ttl="1h", username="limited", password="word")
    rig.store(keys[:3])
    rig.tier.touch(keys, rig.new_request())  # is refused
    wait_until(lambda: bool(rig.tier.stats()["failed_blocks_total"]))
    more = make_keys(2, "more")
    rig.store(more[:1])
    assert touched(rig, more) == more[1:]
    assert rig.load(keys[:3]) == set(keys[:3])
