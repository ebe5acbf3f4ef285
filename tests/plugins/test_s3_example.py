"""The example stack runs, on moto's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from tiered_kv.base import make_offload_key
from tiered_kv.config.stack_config import load_config
from tiered_kv.hooks import tier_plugins
from tiered_kv.stack import open_stack
from tiered_kv.testing.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server, moto_bucket, moto_server

__all__ = ["moto_bucket", "moto_server"]

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "s3.yaml"


@pytest.fixture
def plugin() -> Iterator[None]:
    """The plugin, where the distribution is not installed."""
    plugins = tier_plugins()
    if "s3" in plugins.tier_types():
        yield
        return
    import tiered_kv_s3

    plugins.register(tiered_kv_s3)
    yield
    plugins.unregister("tiered_kv_s3")


@pytest.fixture
def example(moto_server: S3Server, moto_bucket: str, plugin: None, monkeypatch: pytest.MonkeyPatch) -> Path:
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
        stack.put([make_offload_key(b"another", 0)], blocks[:1])  # the tier waits for its first listing no more
        assert stack.flush(timeout=60.0)
    out = np.zeros_like(blocks)
    with open_stack(entries) as stack:
        assert stack.get(keys, out, timeout=60.0) == 6
    assert (out == blocks).all()


def test_the_printed_configuration_shows_no_secret(example: Path) -> None:
    config = load_config(example)
    assert SECRET_ACCESS_KEY not in f"{config!r} {config.secondary[0].public_dict()}"
