"""A reset of a redis tier stays done when the server falls back to an older state, or loses everything."""

from __future__ import annotations

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.redis_servers import RedisServer, redis_server
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.epoch import EpochMark, forget_retired

pytest.importorskip("redis", reason="redis-py is not installed")

__all__ = ["redis_server"]

MARK = f"tkv1:{bytes(range(16)).hex()}:epoch".encode()
OLD, NEW = make_keys(8, "old weights"), make_keys(8, "new weights")


def mark_of(server: RedisServer) -> EpochMark | None:
    return EpochMark.decode(server.get(MARK))


def test_an_old_snapshot_under_a_running_process_brings_no_old_block_back(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    rig = open_redis(url=redis_server.url)
    assert rig.store(OLD).success
    assert redis_server.call("SAVE") == b"+OK\r\n"
    rig.tier.reset_cache()
    assert rig.store(NEW).success
    renewed = mark_of(redis_server)
    redis_server.restart()  # it reads the snapshot
    assert mark_of(redis_server) != renewed, "the server did not fall back"
    assert rig.load(OLD) == set()
    assert mark_of(redis_server) == renewed
    assert rig.tier.stats()["epoch_repairs_total"] == 1
    assert rig.store(NEW).success
    forget_retired()  # as in a process that has not seen the reset
    newcomer = open_redis(url=redis_server.url)
    assert (newcomer.load(OLD), newcomer.load(NEW)) == (set(), set(NEW))
