"""The example stack runs, on moto's server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from tiered_kv.base import make_offload_key
from tiered_kv.stack import open_stack
from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server, moto_bucket, moto_server

__all__ = ["moto_bucket", "moto_server"]

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "s3.yaml"


@pytest.fixture
def example(moto_server: S3Server, moto_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (
        ("S3_ENDPOINT", moto_server.url),
        ("S3_BUCKET", moto_bucket),
        ("S3_KEY_ID", ACCESS_KEY_ID),
        ("S3_SECRET", SECRET_ACCESS_KEY),
    ):
        monkeypatch.setenv(name, value)
    return EXAMPLE


def test_blocks_come_back_from_the_bucket_into_another_stack(example: Path) -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (6, 1 << 20), dtype=np.uint8)
    keys = [make_offload_key(f"block {index}".encode(), 0) for index in range(6)]
    entries = yaml.safe_load(example.read_text())
    entries["secondary"][0]["lookup_timeout"] = "60s"  # so that no block is a miss because the machine is busy
    with open_stack(entries) as stack:
        assert stack.put(keys, blocks, timeout=60.0) == 6
        assert stack.flush(timeout=60.0)
    out = np.zeros_like(blocks)
    with open_stack(entries) as stack:
        assert stack.get(keys, out, timeout=60.0) == 6
    assert (out == blocks).all()
