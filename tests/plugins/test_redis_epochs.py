"""A reset of a redis tier stays done when the server falls back to an older state, or loses everything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.conftest import OpenRedis
from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.epoch import EpochMark

pytest.importorskip("redis", reason="redis-py is not installed")

__all__ = ["redis_server"]

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 512
MARK = f"tkv1:{bytes(range(16)).hex()}:epoch"
OLD, NEW = make_keys(8, "old weights"), make_keys(8, "new weights")

LOADER = """
import json, sys
from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import TierRig
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

settings = RedisSettings.model_validate({"url": sys.argv[1], **json.loads(sys.argv[2])})
rig = TierRig(lambda spec, view: RedisTier(spec, view, "redis", settings), num_blocks=64, block_bytes=512, wait_s=60.0)
print([sum(rig.load([OffloadKey(bytes.fromhex(key))]) != set() for key in keys.split()) for keys in sys.argv[3:]])
rig.close()
"""


def mark_of(server: RedisServer) -> EpochMark | None:
    return EpochMark.decode(server.get(MARK.encode()))


def found_by_another_process(server: RedisServer) -> list[int]:
    """Return how many of the old and of the new blocks a process loads that opens the tier now."""
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}", "PATH": "/usr/bin:/bin"}
    keys = [" ".join(key.hex() for key in keys) for keys in (OLD, NEW)]
    command = [sys.executable, "-c", LOADER, server.url, json.dumps(PATIENT), *keys]
    done = subprocess.run(command, env=path, check=True, capture_output=True, timeout=300)
    found: list[int] = json.loads(done.stdout)
    return found


def test_an_old_snapshot_under_a_running_process_brings_no_old_block_back(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    rig = open_redis(BLOCK_BYTES, url=redis_server.url)
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
    assert found_by_another_process(redis_server) == [0, len(NEW)]


def test_after_flushall_the_running_process_goes_on_and_writes_its_mark_again(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    rig = open_redis(BLOCK_BYTES, url=redis_server.url)
    assert rig.store(OLD).success
    before = mark_of(redis_server)
    redis_server.call("FLUSHALL")
    redis_server.call("CLIENT", "KILL", "TYPE", "normal")  # so that it connects anew
    assert rig.load(OLD) == set()
    assert mark_of(redis_server) == before
