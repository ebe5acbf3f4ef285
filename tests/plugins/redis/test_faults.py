"""A redis tier over a server that is full, read-only, frozen or slow, or has other values; and what it stores."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from tests.plugins.conftest import DIGEST, OpenRedis, block_names, calls
from tests.support.redis_servers import RedisServer
from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults
from tiered_kv.testing.rig import make_keys
from tiered_kv_redis.administration import RedisAdministration
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

pytest.importorskip("redis", reason="redis-py is not installed")


def test_a_full_server_refuses_blocks_and_gives_those_it_has(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    rig = open_redis(url=redis_server.url)
    kept, refused = make_keys(8, "kept"), make_keys(8, "refused")
    rig.store(kept)
    redis_server.call("CONFIG", "SET", "maxmemory", "1")
    redis_server.call("CONFIG", "RESETSTAT")
    result = rig.store(refused)
    statistics = redis_server.call("INFO", "commandstats")
    assert re.search(rb"cmdstat_set:.*rejected_calls=8,", statistics), "a block that is refused is sent once"
    assert b"cmdstat_strlen" not in statistics, "and nothing else is asked"
    assert (result.success, result.reason, result.successful_keys or ()) == (False, "no_space", ())
    assert rig.load(kept) == set(kept)
    assert not rig.lookup(refused[0])
    redis_server.call("CONFIG", "SET", "maxmemory", "0")
    wait_until(lambda: rig.store(refused).success)
    assert rig.load(refused) == set(refused)
    assert count_of(rig.tier.stats(), "failed_blocks_total", "store", "no_space") >= 8


def test_a_server_gets_one_connection_a_thread(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    rig = open_redis(url=redis_server.url, connections=2, timeout=60)
    keys = make_keys(400)
    jobs = [rig.submit_store(keys[start : start + 10]) for start in range(0, 400, 10)]
    rig.lookup_all(make_keys(50, "absent"))
    assert all(result.success for result in rig.wait(jobs))
    opened = redis_server.call("CLIENT", "LIST", "TYPE", "normal").count(b"cmd=") - 1  # this question's own
    assert 1 <= opened <= 2 + 1, "two threads for transfers, one for lookups"


def test_a_read_only_replica_gives_blocks_and_takes_none(
    redis_server: RedisServer, open_redis: OpenRedis, tmp_path: Path
) -> None:
    rig = open_redis(url=redis_server.url)
    keys = make_keys(4)
    rig.store(keys)
    with RedisServer(tmp_path) as replica:
        replica.call("REPLICAOF", "127.0.0.1", str(redis_server.port))
        wait_until(lambda: b"master_link_status:up" in replica.call("INFO", "replication"))
        reader = open_redis(url=replica.url)
        assert reader.load(keys) == set(keys)
        result = reader.store(make_keys(4, "new"))
        assert (result.success, result.reason) == (False, "readonly")
        assert "takes no writes (READONLY You can't write" in str(reader.tier.describe()["warning"])
        assert "refuses" not in str(rig.tier.describe())
        settings = RedisSettings.model_validate({"url": replica.url})
        with (
            contextlib.closing(RedisAdministration(settings)) as administration,
            pytest.raises(
                TierUnavailableError,
                match=r"takes no writes \(You can't write.*; give the address of the master",
            ),
        ):
            administration.purge(DIGEST.hex(), time.monotonic() + 60.0)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_server_with_too_many_clients_says_so_on_its_unix_socket(
    open_redis: OpenRedis,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_late: bool,
) -> None:
    path = str(tmp_path / "socket")
    if is_late:  # the server's words come after the look for them, and the next command finds the socket closed
        monkeypatch.setattr("tiered_kv_redis.connection.FirstReplyConnection.can_read", lambda *_: False)
    with RedisServer(tmp_path / "redis", ["--unixsocket", path, "--maxclients", "1"]) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as only:
            only.sendall(b"PING\r\n")
            assert only.recv(100) == b"+PONG\r\n"
            rig = open_redis(socket=path)
            assert "max number of clients reached" in caplog.text
        wait_until(lambda: rig.store(make_keys(1)).success)


def test_a_name_that_leads_to_another_master_is_followed_while_the_old_one_keeps_its_connections(
    redis_server: RedisServer, open_redis: OpenRedis, tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "promoted") as promoted, FaultProxy(redis_server.address) as name:
        rig = open_redis(url=f"redis://{name.host}:{name.port}")
        assert rig.store(make_keys(4, "before")).success
        redis_server.call("REPLICAOF", "127.0.0.1", str(promoted.port))
        name.server = promoted.address  # for new connections
        wait_until(lambda: rig.store(make_keys(4, "after")).success)
        assert block_names(promoted)
        assert rig.load(make_keys(4, "after")) == set(make_keys(4, "after"))


def test_a_reset_at_the_end_reaches_the_master_to_which_the_name_leads_now(
    redis_server: RedisServer, open_redis: OpenRedis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "promoted") as promoted, FaultProxy(redis_server.address) as name:
        rig = open_redis(url=f"redis://{name.host}:{name.port}", connections=1)
        assert rig.store(make_keys(4)).success
        redis_server.call("REPLICAOF", "127.0.0.1", str(promoted.port))
        name.server = promoted.address
        rig.tier.reset_cache()
        rig.close()
        assert promoted.keys("tkv1:*:epoch")
        assert "reset" not in caplog.text


def test_a_server_that_stays_read_only_gets_few_new_connections(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    rig = open_redis(url=redis_server.url, connections=1)
    redis_server.call("REPLICAOF", "127.0.0.1", "1")
    redis_server.call("CONFIG", "RESETSTAT")
    begin = time.monotonic()
    for number in range(100):
        assert rig.store(make_keys(1, f"{number}")).reason == "readonly"
    opened = re.search(rb"total_connections_received:(\d+)", redis_server.call("INFO", "stats"))
    assert opened is not None
    assert int(opened[1]) <= 2 + 2 * (time.monotonic() - begin + 1), "at most twice a second, and this question's own"


@pytest.mark.parametrize("limit", [28_000, 100_000])
def test_loads_fit_into_a_server_s_output_limit(
    redis_server: RedisServer, open_redis: OpenRedis, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_redis(url=redis_server.url, connections=1)
    keys = make_keys(64)
    assert rig.store(keys).success
    redis_server.call("CONFIG", "SET", "client-output-buffer-limit", f"normal {limit} 0 0")
    redis_server.call("CONFIG", "RESETSTAT")
    assert rig.load(keys) == set(keys)
    was_cut = b"total_connections_received:1\r" not in redis_server.call("INFO", "stats")  # Valkey counts otherwise
    assert ("client-output-buffer-limit" in caplog.text) is was_cut
    caplog.clear()
    redis_server.call("CONFIG", "RESETSTAT")
    assert rig.load(keys) == set(keys)
    assert b"total_connections_received:1\r" in redis_server.call("INFO", "stats"), "this question's own"
    assert not caplog.text


@pytest.mark.slow
def test_loads_ask_for_as_much_as_before_some_time_after_a_cut(
    redis_server: RedisServer, open_redis: OpenRedis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_redis(url=redis_server.url, connections=1)
    keys = make_keys(64)
    assert rig.store(keys).success
    monkeypatch.setattr("tiered_kv_redis.node._NARROW_S", 0.5)
    (node,) = cast(RedisTier, rig.tier)._topology.nodes()
    for _ in range(2):
        redis_server.call("CONFIG", "SET", "client-output-buffer-limit", "normal 28000 0 0")
        rig.load(keys)
        redis_server.call("CONFIG", "SET", "client-output-buffer-limit", "normal 0 0 0")
        wait_until(lambda: node.pending_bytes_max is None)
    assert rig.load(keys) == set(keys)
    assert caplog.text.count("client-output-buffer-limit") <= 1


@pytest.mark.slow
def test_a_frozen_server_holds_no_job_longer_than_its_timeout(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    keys = make_keys(8)
    assert open_redis(url=redis_server.url).store(keys).success
    rig = open_redis(url=redis_server.url, timeout="600ms", connect_timeout="300ms", lookup_timeout="300ms")
    wait_until(lambda: rig.load(keys) == set(keys))
    redis_server.freeze()
    far = time.monotonic() + 3600.0  # the test does not reach the deadlines
    jobs = [rig.submit_load(keys, deadline=far), rig.submit_store(make_keys(8, "new"), deadline=far)]
    assert not rig.lookup(keys[0])
    results = rig.wait(jobs)
    assert not any(result.success for result in results)
    assert rig.load(keys) == set()
    redis_server.thaw()
    wait_until(lambda: rig.load(keys) == set(keys))


def test_blocks_that_expire_are_misses(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    rig = open_redis(url=redis_server.url, ttl="300ms")
    keys = make_keys(4)
    rig.store(keys)
    wait_until(lambda: not rig.lookup(keys[0]))
    result = rig.wait([rig.submit_load(keys)])[0]
    assert (result.success, result.reason) == (False, "absent")
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 0


def test_values_of_other_kinds_and_holes_are_misses(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    rig = open_redis(url=redis_server.url, connections=1)
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


def test_a_lookup_waits_for_no_transfer_over_a_slow_wire(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
        rig = open_redis(url=f"redis://{proxy.host}:{proxy.port}", connections=2, lookup_timeout="30s", timeout="600s")
        keys = make_keys(128)
        rig.store(keys)
        before = calls(redis_server, "get")
        proxy.set_faults(Faults(bytes_per_s=1e4), Direction.TO_CLIENT)
        # 1 MiB each, over connections of their own: they take longer than a lookup and its test can.
        far = time.monotonic() + 600.0
        loads = [rig.submit_load(keys[:64], deadline=far), rig.submit_load(keys[64:], deadline=far)]
        wait_until(lambda: calls(redis_server, "get") > before + 100)  # both are under way
        assert rig.lookup(keys[0])
        assert rig.poll() == 2, "the wire was not slow"
        assert rig.tier.lookup_failures == 0
        proxy.set_faults(NO_FAULTS, Direction.TO_CLIENT)
        assert all(result.success for result in rig.wait(loads))


def test_a_mark_of_another_kind_is_replaced(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    rig = open_redis(url=redis_server.url)
    (name,) = redis_server.keys("tkv1:*:epoch")
    redis_server.call("DEL", name)
    redis_server.call("LPUSH", name, "a list")
    rig.reopen()
    assert rig.store(make_keys(4)).success
    rig.reopen()
    assert rig.load(make_keys(4)) == set(make_keys(4))


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


def test_a_search_among_foreign_names_ends_by_its_deadline(redis_server: RedisServer) -> None:
    redis_server.call("SET", "foreign", "value")
    with contextlib.closing(RedisAdministration(RedisSettings(url=redis_server.url))) as administration:
        for search in (administration.survey, administration.namespaces, partial(administration.purge, DIGEST.hex())):
            with pytest.raises(TierUnavailableError, match="the time was over"):
                search(time.monotonic() - 1)
