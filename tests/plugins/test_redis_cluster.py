"""A redis tier past one server: a cluster that loses a master, and a master that sentinels watch."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tiered_kv.testing.redis_servers import RedisClusterServers, RedisServer, free_port, redis_cluster, redis_server
from tiered_kv.testing.rig import TierRig, make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

__all__ = ["redis_cluster", "redis_server"]


def open_rig(**settings: object) -> TierRig:
    checked = RedisSettings.model_validate({"timeout": "2s", "connect_timeout": "500ms", **settings})
    return TierRig(
        lambda spec, view: RedisTier(spec, view, "redis", checked), num_blocks=1024, block_bytes=4096, wait_s=20.0
    )


def until(condition: Callable[[], object], timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.1)


def is_replicated(servers: Sequence[RedisServer], masters: Sequence[RedisServer]) -> bool:
    """Return whether each of `masters` has one replica among `servers` with as many values."""
    return sum(map(size_of, servers)) == 2 * sum(map(size_of, masters))


def size_of(server: RedisServer) -> int:
    return int(server.call("DBSIZE")[1:])


@pytest.mark.slow
def test_a_killed_master_costs_misses_only_and_hits_return(redis_cluster: RedisClusterServers) -> None:
    rig = open_rig(mode="cluster", nodes=redis_cluster.addresses)
    try:
        keys = make_keys(300)
        assert rig.store(keys).success
        assert rig.load(keys) == set(keys)
        masters = redis_cluster.masters()
        sizes = [size_of(master) for master in masters]
        assert all(size > 50 for size in sizes), "the blocks are not spread over the masters"
        until(lambda: is_replicated(redis_cluster.servers, masters))  # what replicas have not got is lost with a master
        masters[0].kill()
        survivors = [server for server in redis_cluster.servers if server is not masters[0]]
        partly = rig.load(keys)
        assert len(partly) >= 300 - sizes[0] - 3
        until(lambda: rig.load(keys) == set(keys))
        assert rig.tier.stats()["corrupt_blocks"] == 0
        redis_cluster.wait_until_whole(survivors)
        new = make_keys(300, "after the failover")
        assert rig.store(new).success
        assert rig.load(new) == set(new)
    finally:
        rig.close()


@pytest.mark.slow
def test_slots_that_move_are_followed(redis_cluster: RedisClusterServers) -> None:
    rig = open_rig(mode="cluster", nodes=redis_cluster.addresses[:1])
    try:
        keys = make_keys(200)
        rig.store(keys)
        replica = next(server for server in redis_cluster.servers if server not in redis_cluster.masters())
        until(lambda: is_replicated(redis_cluster.servers, redis_cluster.masters()))
        assert replica.call("CLUSTER", "FAILOVER", "TAKEOVER") == b"+OK\r\n"
        until(lambda: replica in redis_cluster.masters())
        until(lambda: rig.load(keys) == set(keys))
        assert rig.store(make_keys(200, "more")).success
    finally:
        rig.close()


@pytest.mark.slow
def test_a_sentinel_names_the_master_and_its_successor(redis_server: RedisServer, tmp_path: Path) -> None:
    other = tmp_path / "replica"
    other.mkdir()
    replica = RedisServer(other, ("--replicaof", f"127.0.0.1 {redis_server.port}"))
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor blocks 127.0.0.1 {redis_server.port} 1\n"
        "sentinel down-after-milliseconds blocks 500\nsentinel failover-timeout blocks 2000\n"
    )
    replica.start()
    sentinel = subprocess.Popen(
        ["redis-server", str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    rig: TierRig | None = None
    try:
        until(lambda: b"master_link_status:up" in replica.call("INFO", "replication"))
        rig = open_rig(mode="sentinel", service="blocks", nodes=[f"127.0.0.1:{port}"])
        keys = make_keys(20)
        until(lambda: rig is not None and rig.store(keys).success)
        assert str(redis_server.port) in str(rig.tier.describe()["servers"])
        until(lambda: is_replicated([redis_server, replica], [redis_server]))
        time.sleep(1.0)  # the sentinel learns of the replica from the master's INFO, which it asks for once a second
        redis_server.kill()
        assert rig.load(keys) == set()
        until(lambda: rig is not None and rig.load(keys) == set(keys))
    finally:
        if rig is not None:
            rig.close()
        sentinel.kill()
        sentinel.wait()
        replica.kill()
