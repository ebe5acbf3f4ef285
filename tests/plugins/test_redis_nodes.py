"""One dead node is one dead node: it costs its own blocks, and nobody's time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.redis_clusters import RedisClusterServers, redis_cluster
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.testing.waiting import wait_until

pytest.importorskip("redis", reason="redis-py is not installed")

from redis.connection import ConnectionPool
from redis.crc import key_slot

from tiered_kv_redis.endpoint import pool_options
from tiered_kv_redis.exchange import Calls, converse
from tiered_kv_redis.node import Node
from tiered_kv_redis.replies import command
from tiered_kv_redis.settings import Address, RedisSettings

__all__ = ["redis_cluster", "redis_server"]

BLOCK_BYTES = 4096
PROMPTS, PROMPT_BLOCKS = 40, 6
MakeNode = Callable[..., Node]
until = partial(wait_until, pause_s=0.02)


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(port: int, connect_timeout: str = "60s") -> Node:
        address = Address("127.0.0.1", port)
        settings = RedisSettings(host=address.host, port=port, connect_timeout=connect_timeout)
        nodes.append(Node(str(address), pool_options(settings, address)))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def ask(*nodes: Node, timeout_s: float = 60.0) -> list[str]:
    """Ask each server one question, side by side; return why those that did not answer did not."""
    calls = [Calls(node, [command(b"STRLEN", b"any")]) for node in nodes]
    converse(calls, time.monotonic() + timeout_s)
    return [each.failures.get(0, "") for each in calls]


def test_a_server_that_is_down_is_not_asked_until_it_can_be_connected_to(
    redis_server: RedisServer, make_node: MakeNode
) -> None:
    node = make_node(redis_server.port)
    assert ask(node) == [""]
    redis_server.kill()
    assert ask(node) == ["unavailable"]
    assert node.is_down
    redis_server.start()
    until(lambda: not node.is_down)
    assert ask(node) == [""]


def test_a_server_that_takes_connections_and_says_nothing_holds_only_who_asks_first(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        node = make_node(mute.getsockname()[1], connect_timeout="200ms")
        assert ask(node) == ["timeout"]
        connecting: set[str] = set()
        connect = ConnectionPool.get_connection

        def noted(pool: ConnectionPool) -> object:
            connecting.add(threading.current_thread().name)
            return connect(pool)

        monkeypatch.setattr(ConnectionPool, "get_connection", noted)
        until(lambda: ask(node) == ["timeout"] and connecting)
        assert connecting == {"tiered-kv-redis-probe"}


def test_a_closed_node_connects_to_nobody(redis_server: RedisServer, make_node: MakeNode) -> None:
    node = make_node(redis_server.port)
    assert ask(node) == [""]
    taken = node.take()
    node.close()
    node.give_back(taken)
    assert ask(node) == ["unavailable"]
    until(lambda: redis_server.call("CLIENT", "LIST").count(b"addr=") == 2)  # laddr of the one that asks


def test_a_server_that_does_not_answer_takes_no_time_from_those_that_do(
    redis_server: RedisServer, make_node: MakeNode, tmp_path: Path
) -> None:
    (tmp_path / "frozen").mkdir()
    frozen = RedisServer(tmp_path / "frozen")
    frozen.start()
    try:
        living, dead = make_node(redis_server.port), make_node(frozen.port, connect_timeout="200ms")
        assert ask(dead, living) == ["", ""]
        frozen.freeze()
        assert ask(dead, living, timeout_s=1.0) == ["timeout", ""]
        assert (dead.is_down, living.is_down) == (True, False)
        assert ask(dead, living) == ["timeout", ""]
    finally:
        frozen.kill()


# A whole cluster.


def prompts() -> list[list[OffloadKey]]:
    return [make_keys(PROMPT_BLOCKS, f"prompt {number}") for number in range(PROMPTS)]


def open_cluster(cluster: RedisClusterServers) -> Stack:
    entry = {"type": "redis", "mode": "cluster", "nodes": cluster.addresses, "connect_timeout": "1s"}
    return open_stack(
        {
            "version": 1,
            "namespace": {"model": "nodes"},
            "block": {"bytes": BLOCK_BYTES, "tokens": 16},
            "primary": {"capacity": PROMPTS * PROMPT_BLOCKS * BLOCK_BYTES},
            "secondary": [{**entry, "timeout": "5s", "lookup_timeout": "2s"}],
        }
    )


def living_blocks(keys: list[OffloadKey], slots: range, prefix: bytes) -> int:
    """Return how many blocks of a prompt come before the first that a server with `slots` has."""
    dead = (at for at, key in enumerate(keys) if key_slot(prefix + key) in slots)
    return next(dead, len(keys))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_blocks_of_living_masters_are_found_while_one_is_dead(how: str, redis_cluster: RedisClusterServers) -> None:
    redis_cluster.keep_masters()  # so that it stays dead
    for server in redis_cluster.servers:
        assert server.call("CONFIG", "SET", "cluster-require-full-coverage", "no") == b"+OK\r\n"
    with open_cluster(redis_cluster) as stack:
        content = {key: block_content(key, BLOCK_BYTES) for keys in prompts() for key in keys}
        for keys in prompts():
            blocks = np.frombuffer(b"".join(content[key] for key in keys), np.uint8).reshape(len(keys), BLOCK_BYTES)
            assert stack.put(keys, blocks) == len(keys)
        assert stack.flush(timeout=60.0)
        dead = redis_cluster.servers[2]  # the last third of the slots, as they were dealt out
        names = [name for name in redis_cluster.servers[0].keys("tkv1:*") if name[54:55] == b":"]
        prefix = names[0][:55]
        getattr(dead, how)()
        out = np.zeros((PROMPT_BLOCKS, BLOCK_BYTES), np.uint8)
        found = living = 0
        reachable = {keys[0]: living_blocks(keys, range(10_923, 16_384), prefix) for keys in prompts()}
        for _ in range(3):
            # Many in a row of which nothing can be found: a breaker would open, and lose those that follow.
            for keys in sorted(prompts(), key=lambda keys: reachable[keys[0]]):
                stack.primary.reset_cache()
                found += stack.get(keys, out, timeout=30.0)
                living += reachable[keys[0]]
        (tier,) = (counted for name, counted in stack.counters().items() if name != "cpu")
        assert tier.get("breaker_opened_total", 0) == 0
        assert living > PROMPTS
        assert found >= 0.9 * living, f"{found} of {living} blocks of living masters were found"
        before = tier["stored_blocks_total"]
        new = make_keys(60, "while one is dead")
        blocks = np.zeros((len(new), BLOCK_BYTES), np.uint8)
        stack.put(new, blocks)
        stack.flush(timeout=60.0)
        (tier,) = (counted for name, counted in stack.counters().items() if name != "cpu")
        lost = sum(key_slot(prefix + key) >= 10_923 for key in new)
        assert tier["stored_blocks_total"] - before == len(new) - lost
