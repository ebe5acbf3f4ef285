"""Processes that share a Redis server: with one namespace they share blocks, with two they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server

pytest.importorskip("redis", reason="redis-py is not installed")

__all__ = ["redis_server"]

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

url, patience, action, *digests = sys.argv[1:]
settings = RedisSettings.model_validate({"url": url, **json.loads(patience)})
open_tier = lambda spec, view: RedisTier(spec, view, "redis", settings)
keys = make_keys(16)
answers = []
for digest in digests:
    spec = TierSpec("redis", 4096, digest.encode(), {"model": digest})
    rig = TierRig(open_tier, num_blocks=64, block_bytes=4096, wait_s=60.0, spec=spec)
    stored = rig.store(keys).success if action == "store" else False
    found = sum(rig.lookup(key) for key in keys)
    answers.append({"stored": stored, "found": found, "loaded": len(rig.load(keys))})
    rig.close()
print(json.dumps(answers))
"""


def run(url: str, action: str, *digests: str) -> list[dict[str, int]]:
    """Return what a process of its own comes to with each namespace."""
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PROGRAM, url, json.dumps(PATIENT), action, *digests]
    done = subprocess.run(command, env=path, check=True, capture_output=True, timeout=300)
    answer: list[dict[str, int]] = json.loads(done.stdout)
    return answer


def test_two_processes_share_blocks_of_one_namespace_and_not_of_two(redis_server: RedisServer) -> None:
    first, second = "sixteen bytes, 1", "sixteen bytes, 2"
    assert run(redis_server.url, "store", first) == [{"stored": True, "found": 16, "loaded": 16}]
    assert run(redis_server.url, "load", second, first) == [
        {"stored": False, "found": 0, "loaded": 0},
        {"stored": False, "found": 16, "loaded": 16},
    ]
    assert b"sixteen bytes, 1" in redis_server.get(f"tkv1:{b'sixteen bytes, 1'.hex()}:namespace".encode())
