"""Tiers over a host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv import Namespace
from tiered_kv.direct import DirectTiers
from tiered_kv.testing.rig import make_keys

BLOCK_BYTES = 4096
NAMESPACE = Namespace(model="direct")


@pytest.fixture(params=["memory", "nvme", "fs"])
def entry(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, object]:
    tier: Mapping[str, object] = {"type": request.param, "capacity": "16 MiB"}
    return tier if request.param == "memory" else {**tier, "path": str(tmp_path / "tier")}


@pytest.fixture
def memory() -> Any:
    return np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)


@pytest.fixture
def tiers(memory: Any, entry: Mapping[str, object]) -> Iterator[DirectTiers]:
    with DirectTiers(memory, block_bytes=BLOCK_BYTES, tiers=[entry], namespace=NAMESPACE) as tiers:
        yield tiers


@pytest.mark.parametrize("shift", [0, 7], ids=["aligned", "unaligned"])
def test_blocks_come_back_to_any_place_of_the_memory(tiers: DirectTiers, memory: Any, shift: int) -> None:
    keys = make_keys(20)
    sources = [shift + 3 * BLOCK_BYTES * number for number in range(20)]
    targets = [shift + 3 * BLOCK_BYTES * number + 5000 for number in range(20)]
    assert tiers.wait("contains", keys) == [False] * 20
    assert tiers.wait("store", keys, sources) == [True] * 20
    assert tiers.wait("contains", [*keys, *make_keys(2, "others")]) == [True] * 20 + [False] * 2
    assert tiers.wait("load", keys, targets) == [True] * 20
    for source, target in zip(sources, targets, strict=True):
        assert bytes(memory[target : target + BLOCK_BYTES]) == bytes(memory[source : source + BLOCK_BYTES])
