"""The stacks over tiers that machines share: what one stores, another that is opened later loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from tiered_kv.config.stack_config import load_config
from tiered_kv.stack import open_stack
from tiered_kv.testing.redis_servers import redis_server
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, moto_bucket, moto_server

__all__ = ["moto_bucket", "moto_server", "redis_server"]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["fs", "redis", pytest.param("s3", marks=pytest.mark.slow)])
def test_blocks_come_back_into_another_stack(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    tier = entries["secondary"][0]
    tier["lookup_timeout"] = "60s"  # so that no block is a miss because the machine is busy
    if name == "redis":
        tier |= {"url": request.getfixturevalue("redis_server").url, "timeout": "60s", "connect_timeout": "60s"}
    if name == "s3":
        monkeypatch.setenv("S3_ENDPOINT", request.getfixturevalue("moto_server").url)
        monkeypatch.setenv("S3_BUCKET", request.getfixturevalue("moto_bucket"))
        monkeypatch.setenv("S3_KEY_ID", ACCESS_KEY_ID)
        monkeypatch.setenv("S3_SECRET", SECRET_ACCESS_KEY)
    keys = make_keys(6)
    blocks = np.random.default_rng(0).integers(0, 256, (6, load_config(entries).block.bytes), dtype=np.uint8)
    with open_stack(entries) as stack:
        assert stack.put(keys, blocks, timeout=60.0) == 6
        assert stack.flush(timeout=60.0)
    out = np.zeros_like(blocks)
    with open_stack(entries) as stack:
        assert stack.get(keys, out, timeout=60.0) == 6
    assert (out == blocks).all()
