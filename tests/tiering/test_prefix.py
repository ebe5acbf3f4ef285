"""The manager of lists of hashes keeps the contract of `tiered_kv.abstract` over a whole stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.faulty import FourMethodTier
from tests.support.stacks import Register, stack_of
from tiered_kv import EngineStack, PrefixOffloadingManager, open_engine_stack
from tiered_kv.abstract import OffloadingManager
from tiered_kv.base import BlockIDsLoadStoreSpec

NUM_BLOCKS = 16
HASHES = [b"a", b"b", b"c", b"d"]
OTHERS = [bytes([number]) for number in range(NUM_BLOCKS)]
OpenStack = Callable[[], EngineStack]


@pytest.fixture
def open_over(closing: ExitStack, tmp_path: Path) -> OpenStack:
    """Opens a stack over CPU memory and one directory, after the stack before it is closed."""

    def opened() -> EngineStack:
        closing.pop_all().close()
        tier = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
        return closing.enter_context(open_engine_stack(stack_of(tier, blocks=NUM_BLOCKS), enable_events=True))

    return opened


@pytest.fixture
def stack(open_over: OpenStack) -> EngineStack:
    return open_over()


@pytest.fixture
def manager(stack: EngineStack) -> Iterator[PrefixOffloadingManager]:
    yield PrefixOffloadingManager(stack.manager)
    assert stack.manager.drain_jobs(10.0)


def store(manager: OffloadingManager, hashes: list[bytes]) -> list[bytes]:
    output = manager.prepare_store(hashes)
    assert output is not None
    manager.complete_store(output.block_hashes_to_store)
    return output.block_hashes_evicted


def rows_of(spec: object) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return [int(row) for row in spec.block_ids]


def drained(stack: EngineStack, manager: PrefixOffloadingManager, hashes: list[bytes]) -> int:
    """Look up until no block of a tier is on its way."""
    for _ in range(1000):
        if (found := manager.lookup(hashes)) == len(hashes):
            break
        stack.manager.drain_jobs(10.0)
    return found


def test_a_lookup_counts_the_blocks_without_a_gap(manager: PrefixOffloadingManager) -> None:
    assert manager.lookup(HASHES) == 0
    store(manager, [b"a", b"b", b"d"])
    assert manager.lookup(HASHES) == 2
    assert manager.lookup(iter(HASHES[1:])) == 1
    assert manager.lookup([]) == 0


def test_a_block_is_loadable_once_its_store_is_complete(manager: PrefixOffloadingManager) -> None:
    output = manager.prepare_store(iter(HASHES))
    assert output is not None
    assert output.block_hashes_to_store == HASHES
    assert output.block_hashes_evicted == []
    assert len(set(rows_of(output.store_spec))) == len(HASHES)
    assert manager.lookup(HASHES) == 0
    manager.complete_store(HASHES[:3])
    manager.complete_store(HASHES[3:], success=False)
    assert manager.lookup(HASHES) == 3
    again = manager.prepare_store(HASHES)
    assert again is not None
    assert again.block_hashes_to_store == HASHES[3:]


def test_a_store_is_whole_or_changes_nothing(stack: EngineStack, manager: PrefixOffloadingManager) -> None:
    store(manager, HASHES)
    assert stack.manager.drain_jobs(10.0)
    assert manager.prepare_store([*OTHERS, b"one more"]) is None
    assert manager.lookup(HASHES) == len(HASHES)
    output = manager.prepare_store(OTHERS[:-2])
    assert output is None, "the lookup's blocks stay until the next one"
    assert manager.lookup([]) == 0
    assert set(store(manager, OTHERS[:-2])) <= set(HASHES)


def test_blocks_that_are_being_loaded_are_not_evicted(stack: EngineStack, manager: PrefixOffloadingManager) -> None:
    store(manager, HASHES)
    assert manager.lookup(HASHES) == len(HASHES)
    rows = rows_of(manager.prepare_load(HASHES))
    stack.region.array[rows] = np.arange(len(rows), dtype=np.uint8)[:, None]
    assert manager.lookup([b"other"]) == 0
    assert stack.manager.drain_jobs(10.0)
    assert manager.prepare_store(OTHERS) is None
    assert set(store(manager, OTHERS[: NUM_BLOCKS - len(HASHES)])) == set()
    assert (stack.region.array[rows] == np.arange(len(rows), dtype=np.uint8)[:, None]).all()
    manager.complete_load(HASHES)
    assert stack.manager.drain_jobs(10.0)
    assert set(HASHES) <= set(store(manager, [b"x" + each for each in OTHERS]))


def test_blocks_that_were_touched_are_evicted_last(stack: EngineStack, manager: PrefixOffloadingManager) -> None:
    for each in HASHES:
        manager.lookup([each])
        store(manager, [each])
    manager.lookup([])
    manager.touch([b"a", b"nothing"])
    assert stack.manager.drain_jobs(10.0)
    assert store(manager, OTHERS[: NUM_BLOCKS - 3]) == [b"b"]


class AtOnceTier(FourMethodTier):
    """Has ended each job when its submission returns; the manager learns it when it asks."""

    is_nonblocking = True


def test_a_program_that_only_stores_finds_room(closing: ExitStack, register: Register) -> None:
    register("at-once", AtOnceTier)
    stack = closing.enter_context(open_engine_stack(stack_of({"type": "at-once"}, blocks=NUM_BLOCKS)))
    manager = PrefixOffloadingManager(stack.manager)
    for first in range(0, 4 * NUM_BLOCKS, NUM_BLOCKS):
        evicted = store(manager, [number.to_bytes(2, "big") for number in range(first, first + NUM_BLOCKS)])
        assert len(evicted) == (NUM_BLOCKS if first else 0)


def test_blocks_come_back_from_a_tier_also_to_a_later_process(open_over: OpenStack) -> None:
    first = open_over()
    manager = PrefixOffloadingManager(first.manager)
    output = manager.prepare_store(HASHES)
    assert output is not None
    first.region.array[rows_of(output.store_spec)] = np.arange(len(HASHES), dtype=np.uint8)[:, None]
    manager.complete_store(HASHES)
    assert first.manager.drain_jobs(10.0)
    assert set(HASHES) <= set(store(manager, OTHERS))
    assert drained(first, manager, HASHES) == len(HASHES)
    assert first.manager.drain_jobs(10.0)
    second = open_over()
    manager = PrefixOffloadingManager(second.manager)
    assert drained(second, manager, HASHES) == len(HASHES)
    rows = rows_of(manager.prepare_load(HASHES))
    assert (second.region.array[rows] == np.arange(len(HASHES), dtype=np.uint8)[:, None]).all()
    manager.complete_load(HASHES)


def test_events_name_hashes_and_are_taken_once(manager: PrefixOffloadingManager) -> None:
    store(manager, [b"a"])
    (event,) = [event for event in manager.take_events() if event.medium == "CPU"]
    assert (event.block_hashes, event.block_size, event.removed) == ([b"a"], 4096, False)
    assert [event for event in manager.take_events() if event.medium == "CPU"] == []


def test_hashes_of_another_group_are_other_blocks(stack: EngineStack) -> None:
    one, other = (PrefixOffloadingManager(stack.manager, group_idx) for group_idx in (0, 1))
    store(one, HASHES)
    assert (one.lookup(HASHES), other.lookup(HASHES)) == (len(HASHES), 0)
