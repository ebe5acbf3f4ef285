"""The log and `check` name the setting of a Redis server that refuses blocks, and none of one that is dead."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.redis_servers import PASSWORD, RedisServer
from tiered_kv.errors import TierUnavailableError
from tiered_kv.reasons import Reason
from tiered_kv.testing.rig import make_keys
from tiered_kv_redis.reasons import reason_of_code, sentence
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.topology import Topology

pytest.importorskip("redis", reason="redis-py is not installed")

LARGE_BYTES = 2 << 20


@pytest.mark.parametrize("setting", ["client-query-buffer-limit", "proto-max-bulk-len"])
def test_a_limit_below_a_block_is_named_when_a_store_fails_and_by_check(
    open_redis: OpenRedis, tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    with RedisServer(tmp_path, (f"--{setting}", "1mb")) as server:
        rig = open_redis(LARGE_BYTES, url=server.url)
        assert not rig.store(make_keys(3)).success
        assert f"raise its '{setting}'" in caplog.text or f"and '{setting}'" in caplog.text
        assert "cannot be reached" not in caplog.text
        assert setting in str(rig.tier.describe()["warning"])


def test_an_output_limit_below_a_block_is_named(
    redis_server: RedisServer, open_redis: OpenRedis, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_redis(LARGE_BYTES, url=redis_server.url)
    keys = make_keys(3)
    assert rig.store(keys).success
    redis_server.call("CONFIG", "SET", "client-output-buffer-limit", "normal 1mb 0 0")
    assert rig.load(keys) == set()
    assert "client-output-buffer-limit normal" in caplog.text
    assert "cannot be reached" not in caplog.text


def test_a_server_that_dies_while_blocks_are_loaded_is_not_blamed_for_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # nobody answers
        settings = RedisSettings.model_validate({"host": "127.0.0.1", "port": listener.getsockname()[1]})
    with contextlib.closing(Topology(settings)) as topology:
        (node,) = topology.nodes()
        node.narrow(1 << 20)  # a connection was closed within a reply
        node.note_failure(Reason.UNAVAILABLE)
        node.note_loaded()
        assert caplog.messages == []
        node.narrow(1 << 20)
        node.note_loaded()  # the server lives, so it closes connections on purpose
        assert "client-output-buffer-limit" in caplog.text


@pytest.mark.parametrize(
    ("options", "settings", "named"),
    [
        (("--requirepass", PASSWORD), {"password": "an-older-one"}, "correct 'username' and 'password'"),
        (("--requirepass", PASSWORD), {}, "set 'password'"),
        (("--databases", "2"), {"db": 5}, "raise its 'databases'"),
    ],
)
def test_a_refusal_at_the_opening_names_the_setting(
    open_redis: OpenRedis, tmp_path: Path, options: tuple[str, ...], settings: dict[str, object], named: str
) -> None:
    password = options[1] if options[0] == "--requirepass" else ""
    server = RedisServer(tmp_path, () if password else options, password=password)
    with server, pytest.raises(TierUnavailableError, match=named):
        open_redis(url=server.url, **settings)


@pytest.mark.parametrize(
    ("said", "reason", "named"),
    [
        (b"MISCONF Redis is configured ... (stop-writes-on-bgsave-error option).", "readonly", "cannot save its data"),
        (b"MISCONF Errors writing to the AOF file: No space left on device", "readonly", "'appendonly'"),
        (b"READONLY You can't write against a read only replica.", "readonly", "the address of the master"),
        (b"NOREPLICAS Not enough good replicas to write.", "readonly", "'min-replicas-to-write'"),
        (b"OOM command not allowed when used memory > 'maxmemory'.", "no_space", "raise its 'maxmemory'"),
        (b"LOADING Redis is loading the dataset in memory", "loading", "wait until it has"),
        (b"ERR max number of clients reached", "unavailable", "raise its 'maxclients'"),
        (b"ERR Protocol error: invalid bulk length", "server_error", "raise its 'proto-max-bulk-len'"),
        (b"ERR Protocol error: unauthenticated bulk length", "auth", "set 'password'"),
        (b"ERR Protocol error: unauthenticated multibulk length", "auth", "set 'password'"),
    ],
)
def test_what_a_server_says_is_explained_by_its_setting(said: bytes, reason: str, named: str) -> None:
    found = reason_of_code(said)
    assert found == reason
    assert named in sentence("a-server:6379", found, said.decode(), set())


def test_what_fails_is_explained_with_the_newest_words_of_the_server(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    rig = open_redis(4096, url=redis_server.url)
    redis_server.call("CONFIG", "SET", "maxmemory", "1")
    assert not rig.store(make_keys(2)).success
    assert "has no memory left" in str(rig.tier.explain_failure("no_space"))
    redis_server.call("CONFIG", "SET", "maxmemory", "0")
    for words in ("read only replica", "good replicas"):
        if words == "good replicas":
            redis_server.call("REPLICAOF", "NO", "ONE")
            redis_server.call("CONFIG", "SET", "min-replicas-to-write", "1")
        else:
            redis_server.call("REPLICAOF", "127.0.0.1", "1")
        assert not rig.store(make_keys(2)).success
        assert words in str(rig.tier.explain_failure("readonly"))
    assert rig.tier.explain_failure("auth") is None
