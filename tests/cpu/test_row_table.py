"""What Python's collector visits of the primary tier: nothing for each block."""

from __future__ import annotations

import gc

import pytest

from tests.cpu.test_resets import ROWS, found, keys_of, store
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.manager import TieringOffloadingManager


def visited() -> int:
    """Return how many entries of lists and dictionaries a full collection visits, in this process."""
    gc.collect()
    return sum(len(each) for each in gc.get_objects() if isinstance(each, list | dict))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_collection_visits_no_entry_of_a_block(policy: str) -> None:
    region = PrimaryRegion(ROWS, 64)
    manager = TieringOffloadingManager(PrimaryRows(CPUBackend(region), policy))
    keys = keys_of(ROWS)
    before = visited()
    store(manager, keys)
    assert found(manager, keys) == ROWS
    assert visited() - before < ROWS / 2
    manager.reset_cache()
    store(manager, keys, "again")
    assert found(manager, keys) == ROWS
    assert visited() - before < ROWS / 2
    manager.shutdown()
    region.close()
