"""The example stack and the page of the redis tier run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

import tiered_kv
from tiered_kv.hooks import tier_plugins
from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.testing.rig import make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

import tiered_kv_redis
from tiered_kv_redis.settings import RedisSettings

__all__ = ["redis_server"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The tier type is there, installed or not."""
    is_installed = "redis" in tier_plugins().tier_types()
    if not is_installed:
        tier_plugins().register(tiered_kv_redis, "redis for this test")
    yield
    if not is_installed:
        tier_plugins().unregister("redis for this test")


def test_the_example_shares_blocks_between_two_stacks(redis_server: RedisServer) -> None:
    stack = yaml.safe_load((ROOT / "examples" / "redis.yaml").read_text())
    stack["secondary"][0] |= {**PATIENT, "url": redis_server.url}
    keys = make_keys(8)
    block_bytes = tiered_kv.load_config(stack).block.bytes
    blocks = np.random.default_rng(0).integers(0, 256, (8, block_bytes), dtype=np.uint8)
    with tiered_kv.open_stack(stack) as writer:
        assert writer.put(keys, blocks) == 8
        assert writer.flush(timeout=60.0)
    with tiered_kv.open_stack(stack) as reader:
        out = np.empty_like(blocks)
        assert reader.get(keys, out, timeout=60.0) == 8
        assert (out == blocks).all()


def test_the_page_names_every_setting() -> None:
    page = (ROOT / "docs" / "reference" / "redis.md").read_text()
    own = set(RedisSettings.model_fields) - set(tiered_kv.TierSettings.model_fields)
    named = set(re.findall(r"`(\w+)`", "".join(line for line in page.splitlines() if line.startswith("| `"))))
    assert own <= named


def test_the_entries_on_the_page_are_accepted() -> None:
    page = (ROOT / "docs" / "reference" / "redis.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for entry in yaml.safe_load(block)["secondary"]:
        assert RedisSettings.model_validate(entry).addresses
