"""The stacks over tiers that machines share: what one stores, another that is opened later loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.support.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.stack import open_stack
from tiered_kv.stack_config import load_config
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server, moto_bucket, moto_server

__all__ = ["moto_bucket", "moto_server", "redis_server"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def check(name: str, **changes: object) -> None:
    """Store blocks through a stack of the example, and load them through another."""
    entries = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    entries["secondary"][0] |= {"lookup_timeout": "60s", **changes}  # so that a busy machine makes no block a miss
    keys = make_keys(6)
    blocks = np.random.default_rng(0).integers(0, 256, (6, load_config(entries).block.bytes), dtype=np.uint8)
    with open_stack(entries) as stack:
        assert stack.put(keys, blocks, timeout=60.0) == 6
        assert stack.flush(timeout=60.0)
    out = np.zeros_like(blocks)
    with open_stack(entries) as stack:
        assert stack.get(keys, out, timeout=60.0) == 6
    assert (out == blocks).all()


def test_fs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check("fs")


def test_redis(redis_server: RedisServer) -> None:
    check("redis", **PATIENT, url=redis_server.url)


@pytest.mark.slow
def test_s3(moto_server: S3Server, moto_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT", moto_server.url)
    monkeypatch.setenv("S3_BUCKET", moto_bucket)
    monkeypatch.setenv("S3_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("S3_SECRET", SECRET_ACCESS_KEY)
    check("s3")
