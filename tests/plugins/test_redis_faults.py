"""What a redis tier makes of servers that are full, read-only, gone, frozen or lied to."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered_kv.counters import count_of
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.proxy import NO_FAULTS, FaultProxy, Faults
from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_until

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.keyspace import KeySpace
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

__all__ = ["redis_server"]

BLOCK_BYTES = 16 << 10
OpenRig = Callable[..., TierRig]


@pytest.fixture
def open_rig() -> Iterator[OpenRig]:
    """Return a callable that opens a tier on a test bench by its settings."""
    rigs: list[TierRig] = []

    def open_(**settings: object) -> TierRig:
        checked = RedisSettings.model_validate({**PATIENT, **settings})
        rig = TierRig(
            lambda spec, view: RedisTier(spec, view, "redis", checked),
            num_blocks=256,
            block_bytes=BLOCK_BYTES,
            wait_s=60.0,
        )
        rigs.append(rig)
        return rig

    yield open_
    for rig in rigs:
        rig.close()


def block_names(server: RedisServer) -> list[bytes]:
    return [name for name in server.keys("tkv1:*") if not name.endswith((b":epoch", b":namespace"))]


def test_a_full_server_refuses_blocks_and_gives_those_it_has(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url)
    kept, refused = make_keys(8, "kept"), make_keys(8, "refused")
    rig.store(kept)
    redis_server.call("CONFIG", "SET", "maxmemory", "1")
    result = rig.store(refused)
    assert not result.success
    assert result.reason == "no_space"
    assert not result.successful_keys
    assert rig.load(kept) == set(kept)
    assert not rig.lookup(refused[0])
    redis_server.call("CONFIG", "SET", "maxmemory", "0")
    wait_until(lambda: rig.store(refused).success)
    assert rig.load(refused) == set(refused)
    assert count_of(rig.tier.stats(), "failed_blocks_total", "store", "no_space") >= 8


def test_a_read_only_replica_gives_blocks_and_takes_none(
    redis_server: RedisServer, open_rig: OpenRig, tmp_path: Path
) -> None:
    rig = open_rig(url=redis_server.url)
    keys = make_keys(4)
    rig.store(keys)
    other = tmp_path / "replica"
    other.mkdir()
    replica = RedisServer(other)
    replica.start()
    try:
        replica.call("REPLICAOF", "127.0.0.1", str(redis_server.port))
        wait_until(lambda: b"master_link_status:up" in replica.call("INFO", "replication"))
        reader = open_rig(url=replica.url)
        assert reader.load(keys) == set(keys)
        result = reader.store(make_keys(4, "new"))
        assert (result.success, result.reason) == (False, "readonly")
    finally:
        replica.kill()


def test_a_server_that_is_killed_costs_misses_and_is_used_again(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url)
    keys = make_keys(8)
    rig.store(keys)
    assert rig.tier.describe()
    redis_server.kill()
    with pytest.raises(TierUnavailableError, match="cannot be used now: unavailable"):
        rig.tier.describe()
    assert rig.load(keys) == set()
    assert not rig.store(make_keys(4, "meanwhile")).success
    before = rig.tier.lookup_failures
    assert not rig.lookup(keys[0])
    assert rig.tier.lookup_failures > before, "the breaker is not told"
    redis_server.start()
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)
    assert [rig.lookup(key) for key in keys] == [True] * 8


def test_a_server_that_restarts_between_two_jobs_is_not_noticed(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url)
    rig.store(make_keys(4))
    redis_server.kill()
    redis_server.start()
    keys = make_keys(4, "after")
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)


def test_a_frozen_server_holds_no_job_longer_than_its_timeout(redis_server: RedisServer, open_rig: OpenRig) -> None:
    keys = make_keys(8)
    assert open_rig(url=redis_server.url).store(keys).success
    rig = open_rig(url=redis_server.url, timeout="600ms", connect_timeout="300ms", lookup_timeout="300ms")
    wait_until(lambda: rig.load(keys) == set(keys))
    redis_server.freeze()
    far = time.monotonic() + 3600.0  # nobody waits for the deadlines of jobs, the rig for a minute
    jobs = [rig.submit_load(keys, deadline=far), rig.submit_store(make_keys(8, "new"), deadline=far)]
    assert not rig.lookup(keys[0])
    results = rig.wait(jobs)
    assert not any(result.success for result in results)
    assert rig.load(keys) == set()
    redis_server.thaw()
    wait_until(lambda: rig.load(keys) == set(keys))


def test_a_tier_may_be_opened_before_its_server(open_rig: OpenRig, redis_server: RedisServer) -> None:
    redis_server.kill()
    rig = open_rig(url=redis_server.url)
    with pytest.raises(TierUnavailableError, match="cannot be used now"):
        rig.tier.describe()
    assert not rig.lookup(make_keys(1)[0])
    redis_server.start()
    keys = make_keys(4)
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)
    assert str(redis_server.port) in str(rig.tier.describe()["servers"])


def test_blocks_that_expire_are_misses(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url, ttl="300ms")
    keys = make_keys(4)
    rig.store(keys)
    wait_until(lambda: not rig.lookup(keys[0]))
    result = rig.wait([rig.submit_load(keys)])[0]
    assert (result.success, result.reason) == (False, "absent")
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 0


def test_blocks_that_the_server_evicts_are_misses(redis_server: RedisServer, open_rig: OpenRig) -> None:
    redis_server.restart("--maxmemory", "2500kb", "--maxmemory-policy", "allkeys-lru")
    rig = open_rig(url=redis_server.url)
    batches = [make_keys(16, f"batch-{index}") for index in range(12)]
    for batch in batches:
        assert rig.store(batch).success
    found = [key for batch in batches for key in batch if rig.lookup(key)]
    assert 0 < len(found) < 12 * 16
    loaded = set().union(*(rig.load(batch) for batch in batches))
    assert loaded <= set(found)
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: b"",
        lambda value: b"x",
        lambda value: value[:127],
        lambda value: value[:-1],
        lambda value: value[: len(value) // 2],
        lambda value: value + b"x",
        lambda value: value * 40,
        lambda value: bytes(len(value)),
        lambda value: b"\r\n" * (len(value) // 2),
        lambda value: b"$16512\r\n" + value[8:],
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda value: value[:30] + bytes([value[30] ^ 1]) + value[31:],
        lambda value: value[:8] + b"\x02" + value[9:],  # another version of the format
        lambda value: value[:10] + b"\x01" + value[11:],  # another codec
        lambda value: value[:10] + b"\xff" + value[11:],  # an unknown codec
    ],
)
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_value_that_another_client_wrote_is_a_miss_and_its_neighbours_are_not(
    redis_server: RedisServer, open_rig: OpenRig, damage: Callable[[bytes], bytes], position: int
) -> None:
    rig = open_rig(url=redis_server.url, connections=1, pipeline=40_000)
    keys = make_keys(8)
    rig.store(keys)
    name = next(name for name in block_names(redis_server) if name.endswith(b":" + keys[position]))
    redis_server.set(name, damage(redis_server.get(name)))
    loaded = rig.load(keys)
    if count_of(
        rig.tier.stats(), "failed_blocks_total", "load", "too_long"
    ):  # the connection is given up, with what was to follow on it
        assert loaded == set(keys[:position])
    else:
        assert loaded == set(keys) - {keys[position]}
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1
    wait_until(lambda: rig.store(keys).success)
    assert rig.load(keys) == set(keys)


def test_values_of_other_kinds_and_holes_are_misses(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url, connections=1)
    keys = make_keys(32)
    rig.store(keys)
    names = {name[-20:]: name for name in block_names(redis_server)}
    for key in keys[::3]:
        redis_server.call("DEL", names[key])
    for key in keys[1::6]:
        redis_server.call("DEL", names[key])
        redis_server.call("LPUSH", names[key], "not a block")
    good = set(keys) - set(keys[::3]) - set(keys[1::6])
    assert rig.load(keys) == good
    assert [key for key in keys if rig.lookup(key)] == [key for key in keys if key in good]
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)


def gets(server: RedisServer) -> int:
    """Return how many values the server was asked for."""
    found = re.search(rb"cmdstat_get:calls=(\d+)", server.call("INFO", "commandstats"))
    return int(found[1]) if found else 0


def test_a_lookup_does_not_wait_for_a_transfer_over_a_slow_wire(redis_server: RedisServer, open_rig: OpenRig) -> None:
    with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
        rig = open_rig(url=f"redis://{proxy.host}:{proxy.port}", connections=2, lookup_timeout="30s", timeout="600s")
        keys = make_keys(128)
        rig.store(keys)
        before = gets(redis_server)
        proxy.to_client = Faults(bytes_per_s=1e4)
        # 1 MiB each, over connections of their own: they take longer than a lookup and its test can.
        far = time.monotonic() + 600.0
        loads = [rig.submit_load(keys[:64], deadline=far), rig.submit_load(keys[64:], deadline=far)]
        wait_until(lambda: gets(redis_server) > before + 100)  # both are under way
        assert rig.lookup(keys[0])
        assert rig.poll() == 2, "the wire was not slow"
        assert rig.tier.lookup_failures == 0
        proxy.to_client = NO_FAULTS
        assert all(result.success for result in rig.wait(loads))


def test_a_compressed_block_is_read_by_a_tier_that_stores_raw_ones(
    redis_server: RedisServer, open_rig: OpenRig
) -> None:
    writer = open_rig(url=redis_server.url, codec="zstd")
    reader = open_rig(url=redis_server.url)
    keys = make_keys(12)
    writer.store(keys[::2])
    reader.store(keys[1::2])
    assert reader.load(keys) == set(keys)
    assert writer.load(keys) == set(keys)


def test_a_reset_holds_if_the_server_was_away_when_it_came(
    redis_server: RedisServer, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = KeySpace.flush
    monkeypatch.setattr(KeySpace, "flush", lambda keyspace, deadline: flush(keyspace, deadline + 60.0))
    rig = open_rig(url=redis_server.url)
    rig.tier._shutdown_timeout_s = 60.0  # type: ignore[attr-defined]  # it has a second or two, which may be too short
    keys = make_keys(4)
    assert rig.store(keys).success
    redis_server.freeze()
    assert rig.tier.reset_cache()
    redis_server.thaw()
    rig.reopen()
    assert rig.load(keys) == set()
    assert not any(rig.lookup(key) for key in keys)


def test_a_reset_of_one_process_leaves_the_others_blocks_alone(redis_server: RedisServer, open_rig: OpenRig) -> None:
    one, other = open_rig(url=redis_server.url), open_rig(url=redis_server.url)
    keys = make_keys(4)
    one.store(keys)
    assert other.load(keys) == set(keys)
    one.tier.reset_cache()
    assert one.load(keys) == set()
    assert other.load(keys) == set(keys)
    assert other.store(make_keys(4, "old weights")).success
    assert one.load(make_keys(4, "old weights")) == set()


def test_a_lost_mark_brings_no_old_block_back(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url)
    keys = make_keys(4)
    rig.store(keys)
    rig.tier.reset_cache()
    rig.store(make_keys(4, "new"))
    (name,) = [name for name in redis_server.keys("tkv1:*") if name.endswith(b":epoch")]
    redis_server.call("DEL", name)
    rig.reopen()
    assert rig.load(keys) == set()


@pytest.mark.parametrize("value", [("SET", "garbage"), ("SET", "0123456789abcdef" * 1000), ("LPUSH", "a list")])
def test_what_is_no_mark_is_replaced(redis_server: RedisServer, open_rig: OpenRig, value: tuple[str, str]) -> None:
    rig = open_rig(url=redis_server.url)
    (name,) = [name for name in redis_server.keys("tkv1:*") if name.endswith(b":epoch")]
    redis_server.call("DEL", name)
    redis_server.call(value[0], name, value[1])
    rig.reopen()
    keys = make_keys(4)
    wait_until(lambda: rig.store(keys).success)
    rig.reopen()
    assert rig.load(keys) == set(keys)


def test_nothing_listens_is_told_by_describe(open_rig: OpenRig) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # so that nobody else does
        rig = open_rig(host="127.0.0.1", port=held.getsockname()[1])
        with pytest.raises(TierUnavailableError, match="unavailable"):
            rig.tier.describe()
