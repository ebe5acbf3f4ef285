"""Tiers read and write rows directly from the disk, while the kernel moves the rows to huge pages."""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import tiered_kv
from tiered_kv.base import make_offload_key
from tiered_kv.cpu.region import Geometry
from tiered_kv.system import collapse
from tiered_kv.system.collapse import refusal
from tiered_kv.system.limits import Limits
from tiered_kv.worker.shared import SharedRegion
from tiered_kv.worker.shared_file import SharedFile

BLOCK_BYTES, BLOCKS, BATCH = 256 << 10, 128, 32
WAIT_S = 60.0


@pytest.mark.skipif(bool(refusal(Limits().collapsed_size())), reason="this kernel makes no huge pages on request")
def test_direct_transfers_beside_the_collapse_lose_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "_PAUSE_S", 0.05)
    file = SharedFile(f"tiered-kv-test-{secrets.token_hex(16)}", "scheduler", ["scheduler"])
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": 4 * BLOCKS * BLOCK_BYTES}
    rng = np.random.default_rng(0)
    with closing(SharedRegion.join(file, Geometry(BLOCKS, BLOCK_BYTES))) as region:
        namespace = tiered_kv.Namespace(model="m")
        with tiered_kv.DirectTiers(region.flat, block_bytes=BLOCK_BYTES, tiers=[nvme], namespace=namespace) as tiers:
            content = rng.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
            region.array[:] = content
            region.collapse_behind()
            rounds = 0
            while region.is_collapsing or rounds < 2:
                keys = [make_offload_key(b"%016d" % (rounds * BLOCKS + at), 0) for at in range(BLOCKS)]
                for method in ("store", "load"):
                    for at in range(0, BLOCKS, BATCH):
                        part = slice(at, at + BATCH)
                        offsets = [row * BLOCK_BYTES for row in range(at, at + BATCH)]
                        assert all(tiers.wait(method, keys[part], offsets, timeout_s=WAIT_S))
                        if method == "store":
                            region.array[part] = 0
                assert np.array_equal(region.array, content)
                rounds += 1
        assert region.huge_bytes == BLOCKS * BLOCK_BYTES
