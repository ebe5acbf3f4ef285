"""A redis tier over several servers: a cluster that loses a master, and a master that sentinels watch."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.redis_groups import SERVICE, RedisClusterServers, RedisSentinelServers
from tests.support.redis_servers import RedisServer
from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

pytest.importorskip("redis", reason="redis-py is not installed")


until = partial(wait_until, timeout_s=120.0, pause_s=0.1)


@pytest.fixture
def open_rig(open_redis: OpenRedis) -> OpenRedis:
    return lambda **settings: open_redis(4096, **settings)


def is_replicated(servers: Sequence[RedisServer], masters: Sequence[RedisServer]) -> bool:
    """Return whether each of `masters` has one replica among `servers` with as many values."""
    return sum(map(size_of, servers)) == 2 * sum(map(size_of, masters))


def size_of(server: RedisServer) -> int:
    return int(server.call("DBSIZE")[1:])


@pytest.mark.slow
def test_a_killed_master_costs_misses_until_a_replica_leads(
    redis_cluster: RedisClusterServers, open_rig: OpenRedis
) -> None:
    redis_cluster.keep_masters()  # no failover until the test allows it
    rig = open_rig(mode="cluster", nodes=redis_cluster.addresses)
    keys = make_keys(300)
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)
    masters = redis_cluster.masters()
    sizes = [size_of(master) for master in masters]
    assert all(size > 50 for size in sizes), "the blocks are not spread over the masters"
    until(lambda: is_replicated(redis_cluster.servers, masters))  # or blocks are lost with the master
    masters[0].kill()
    survivors = [server for server in redis_cluster.servers if server is not masters[0]]
    partly = rig.load(keys)
    assert len(partly) >= 300 - sizes[0] - 3
    for survivor in survivors:
        assert survivor.call("CONFIG", "SET", "cluster-node-timeout", "2000") == b"+OK\r\n"
    until(lambda: rig.load(keys) == set(keys))
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 0
    redis_cluster.wait_until_whole(survivors)
    new = make_keys(300, "after the failover")
    assert rig.store(new).success
    assert rig.load(new) == set(new)


@pytest.mark.slow
def test_the_commands_that_the_page_names_are_enough_in_a_cluster(tmp_path: Path, open_rig: OpenRedis) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes")
    with RedisServer(tmp_path, options) as master:
        assert master.call("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK\r\n"
        until(lambda: b"cluster_state:ok" in master.call("CLUSTER", "INFO"))
        rights = ["+get", "+set", "+strlen", "+unlink", "+cluster|slots"]
        master.call("ACL", "SETUSER", "tier", "on", ">secret", "~tkv1:*", *rights)
        url = f"redis://tier:secret@127.0.0.1:{master.port}"
        with contextlib.closing(open_rig(mode="cluster", url=url)) as rig:
            assert rig.store(make_keys(8)).success
            assert rig.load(make_keys(8)) == set(make_keys(8))
            master.call("ACL", "SETUSER", "tier", "-cluster|slots")
            with pytest.raises(TierUnavailableError, match=r"\+cluster"):
                open_rig(mode="cluster", url=url)


@pytest.mark.parametrize("entry", [{}, {"mode": "cluster"}, {"mode": "sentinel", "service": "blocks"}])
def test_a_tier_may_be_opened_before_its_servers(
    entry: dict[str, object], caplog: pytest.LogCaptureFixture, open_rig: OpenRedis
) -> None:
    with contextlib.ExitStack() as held:
        members = [held.enter_context(socket.socket()) for _ in range(3)]
        for member in members:  # reserved, and not listened on
            member.bind(("127.0.0.1", 0))
        nodes = [f"127.0.0.1:{member.getsockname()[1]}" for member in members]
        rig = open_rig(**(entry | {"nodes": nodes} if entry else {"url": f"redis://{nodes[0]}"}))
        held.callback(rig.close)
        assert all(node in caplog.text for node in (nodes if entry else nodes[:1]))
        assert "cannot be reached (Connection refused); start it, or correct its address" in caplog.text
        result = rig.store(make_keys(4))
        assert (result.success, result.reason) == (False, "unavailable")
        before = rig.tier.lookup_failures
        assert not rig.lookup(make_keys(1)[0])
        assert rig.tier.lookup_failures > before, "no failure for the breaker"
        with pytest.raises(TierUnavailableError, match="cannot be reached"):
            rig.tier.describe()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{"mode": "cluster"}, {"mode": "sentinel", "service": "blocks"}])
def test_members_that_do_not_answer_hold_nobody_beyond_a_deadline(mode: dict[str, object], open_rig: OpenRedis) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]  # which accept connections and send nothing
    nodes = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
    begin = time.monotonic()
    rig = open_rig(**mode, nodes=nodes, timeout="300ms", connect_timeout="40s", lookup_timeout="200ms")
    try:
        assert time.monotonic() - begin < 20.0, "opening waited for one of them"
        begin = time.monotonic()
        result = rig.wait([rig.submit_load(make_keys(4), deadline=begin + 0.2)])[0]
        assert not result.success
        assert time.monotonic() - begin < 20.0
    finally:
        for each in listeners:
            each.close()
        rig.close()


@pytest.mark.slow
def test_slots_that_move_are_followed(redis_cluster: RedisClusterServers, open_rig: OpenRedis) -> None:
    redis_cluster.keep_masters()  # only the chosen replica takes its master's place
    rig = open_rig(mode="cluster", nodes=redis_cluster.addresses[:1])
    keys = make_keys(200)
    rig.store(keys)
    replica = next(server for server in redis_cluster.servers if server not in redis_cluster.masters())
    until(lambda: is_replicated(redis_cluster.servers, redis_cluster.masters()))
    assert replica.call("CLUSTER", "FAILOVER", "TAKEOVER") == b"+OK\r\n"
    until(lambda: replica in redis_cluster.masters())
    until(lambda: rig.load(keys) == set(keys))
    assert rig.store(make_keys(200, "more")).success


@pytest.mark.slow
def test_a_sentinel_names_the_master_and_its_successor(
    redis_sentinel: RedisSentinelServers, open_rig: OpenRedis
) -> None:
    master = redis_sentinel.master
    rig = open_rig(mode="sentinel", service=SERVICE, nodes=[redis_sentinel.address])
    keys = make_keys(20)
    until(lambda: rig.store(keys).success)
    assert str(master.port) in str(rig.tier.describe()["servers"])
    until(lambda: is_replicated([master, redis_sentinel.replica], [master]))
    redis_sentinel.kill_master()
    assert rig.load(keys) == set()
    until(lambda: rig.load(keys) == set(keys))


@pytest.mark.slow
def test_a_cluster_whose_mode_is_not_said_is_an_error(redis_cluster: RedisClusterServers, open_rig: OpenRedis) -> None:
    redis_cluster.keep_masters()
    refusals: list[str] = []
    for master in redis_cluster.masters():  # one has the slot of the epoch's mark
        try:
            open_rig(url=master.url).close()
        except TierUnavailableError as error:
            refusals.append(str(error))
    assert ["'mode'" in refusal for refusal in refusals] == [True, True]
