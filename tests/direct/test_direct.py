"""Tiers over a host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv import Namespace, OffloadKey
from tiered_kv.direct import DirectTiers
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit import Outcome
from tiered_kv_memory.tier import MemoryTier

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


def test_blocks_that_wait_too_long_for_a_budget_fail(memory: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks are stored and one waits: the tier's budget is full for longer than a block may wait."""
    store = MemoryTier.store_blocks

    def store_behind_gate(tier: MemoryTier, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        gate.pass_through()
        return store(tier, keys, blocks)

    monkeypatch.setattr(MemoryTier, "store_blocks", store_behind_gate)
    gate.close()
    entry = {"type": "memory", "capacity": "16 MiB", "store_budget": 2 * BLOCK_BYTES}
    stored: list[bool] = []
    with DirectTiers(memory, block_bytes=BLOCK_BYTES, tiers=[entry], namespace=NAMESPACE, wait_s_max=0.05) as tiers:
        tiers.store(make_keys(2), [0, BLOCK_BYTES], stored.extend)
        assert tiers.wait("store", make_keys(1, "late"), [2 * BLOCK_BYTES]) == [False]
        assert tiers.counters()["memory"]["skipped_blocks_total"] == {"budget": 1}
        gate.open()
    assert stored == [True, True]
