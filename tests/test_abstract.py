"""The hash-list interface over a manager of today."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiered_kv.abstract import OffloadingManager, PrefixOffloadingManager
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.rig import FourMethodTier
from tiered_kv.tiering.manager import TieringOffloadingManager

NUM_BLOCKS = 16
HASHES = [b"a", b"b", b"c", b"d"]


@pytest.fixture
def manager() -> Iterator[PrefixOffloadingManager]:
    region = PrimaryRegion(NUM_BLOCKS, 64)
    primary = CPUOffloadingManager(CPUBackend(region), enable_events=True)
    tiering = TieringOffloadingManager(primary, [FourMethodTier(None, region.kv_view, "dict")])
    yield PrefixOffloadingManager(tiering)
    tiering.shutdown()


def store(manager: OffloadingManager, hashes: list[bytes]) -> list[bytes]:
    output = manager.prepare_store(hashes)
    assert output is not None
    manager.complete_store(output.block_hashes_to_store)
    return output.block_hashes_evicted


def test_lookup_answers_the_length_of_the_prefix(manager: PrefixOffloadingManager) -> None:
    assert manager.lookup(HASHES) == 0
    store(manager, [b"a", b"b", b"d"])
    assert manager.lookup(HASHES) == 2
    assert manager.lookup([]) == 0
    spec = manager.prepare_load(HASHES[:2])
    assert len(spec.block_ids) == 2  # type: ignore[attr-defined]  # a CPULoadStoreSpec
    manager.complete_load(HASHES[:2])


def test_a_store_may_be_completed_after_other_lookups(manager: PrefixOffloadingManager) -> None:
    output = manager.prepare_store(HASHES)
    assert output is not None
    assert output.block_hashes_to_store == HASHES
    assert manager.lookup(HASHES) == 0
    manager.complete_store(HASHES[:3])
    manager.complete_store(HASHES[3:], success=False)
    assert manager.lookup(HASHES) == 3


def test_blocks_below_come_back_for_those_who_ask_again(manager: PrefixOffloadingManager) -> None:
    store(manager, HASHES)
    assert isinstance(manager.manager, TieringOffloadingManager)
    assert manager.manager.drain_jobs(10)
    assert set(HASHES) <= set(store(manager, [bytes([i]) for i in range(NUM_BLOCKS)]))
    assert manager.manager.drain_jobs(10)
    for _ in range(10_000):
        if manager.lookup([b"a", b"b"]) == 2:
            break
        manager.manager.drain_jobs(10)
    assert manager.lookup([b"a", b"b"]) == 2


def test_no_room_is_none(manager: PrefixOffloadingManager) -> None:
    assert manager.prepare_store([bytes([i]) for i in range(NUM_BLOCKS + 1)]) is None


def test_events_and_touches_speak_of_hashes(manager: PrefixOffloadingManager) -> None:
    store(manager, [b"a"])
    manager.touch([b"a", b"nothing"])
    (event,) = manager.take_events()
    assert (event.block_hashes, event.block_size, event.medium, event.removed) == ([b"a"], 64, "CPU", False)
