"""The primary tier alone, as an engine's manager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiered_kv.base import OffloadKey, PrepareStoreOutput, ReqContext, make_offload_key
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.policies import BUILT_IN_POLICIES
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PROMOTION_ROWS_MAX, PrimaryRows
from tiered_kv.cpu.writers import PROMOTION
from tiered_kv.tiering.manager import TieringOffloadingManager

NUM_BLOCKS = 8


@pytest.fixture(params=BUILT_IN_POLICIES)
def manager(request: pytest.FixtureRequest) -> Iterator[TieringOffloadingManager]:
    region = PrimaryRegion(NUM_BLOCKS, 64)
    manager = TieringOffloadingManager(PrimaryRows(CPUBackend(region), request.param, enable_events=True))
    yield manager
    manager.shutdown()


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(b"hash-%d" % number, 0) for number in numbers]


def prepare_store(manager: TieringOffloadingManager, wanted: list[OffloadKey], req_id: str) -> PrepareStoreOutput:
    output = manager.prepare_store(wanted, ReqContext(req_id))
    assert output is not None
    return output


def store(manager: TieringOffloadingManager, wanted: list[OffloadKey], req_id: str) -> list[OffloadKey]:
    output = prepare_store(manager, wanted, req_id)
    manager.complete_store(output.keys_to_store, ReqContext(req_id))
    return output.evicted_keys


def used_rows(manager: TieringOffloadingManager) -> int:
    return NUM_BLOCKS - manager.primary.backend.get_num_free_blocks()


def test_stored_blocks_and_blocks_that_are_being_stored_are_not_stored_again(manager: TieringOffloadingManager) -> None:
    store(manager, keys(1), "a")
    assert prepare_store(manager, keys(1, 2, 2), "a").keys_to_store == keys(2)
    assert prepare_store(manager, keys(1, 2, 3), "b").keys_to_store == keys(3)


def test_a_store_that_finds_no_room_changes_nothing(manager: TieringOffloadingManager) -> None:
    store(manager, keys(*range(6)), "a")
    manager.prepare_load(keys(0, 1, 2), ReqContext("b"))
    assert manager.prepare_store(keys(*range(10, 16)), ReqContext("c")) is None
    assert used_rows(manager) == 6
    assert [manager.lookup(key, ReqContext("b")) for key in keys(*range(6))] == [True] * 6


def test_only_ready_blocks_are_evicted(manager: TieringOffloadingManager) -> None:
    store(manager, keys(0, 1, 2, 3), "a")
    manager.prepare_load(keys(0, 1), ReqContext("b"))
    manager.prepare_store(keys(10, 11, 12, 13), ReqContext("c"))
    assert sorted(prepare_store(manager, keys(20, 21), "d").evicted_keys) == keys(2, 3)
    assert manager.prepare_store(keys(30), ReqContext("e")) is None
    manager.complete_load(keys(0, 1), ReqContext("b"))
    assert prepare_store(manager, keys(30), "e").evicted_keys == keys(1)


@pytest.mark.parametrize(("num_blocks", "evicted"), [(256, 1), (1024, 2), (8192, PROMOTION_ROWS_MAX)])
def test_a_promoted_block_evicts_few_rows_ahead_and_none_of_its_own_request(num_blocks: int, evicted: int) -> None:
    manager = TieringOffloadingManager(PrimaryRows(CPUBackend(PrimaryRegion(num_blocks, 64))))
    own, other = keys(*range(num_blocks - evicted)), keys(*range(num_blocks, num_blocks + evicted))
    store(manager, own, "own")
    store(manager, other, "other")
    chain = manager.primary.blocks[own[0]].chain
    assert chain is not None
    gone: list[OffloadKey] = []
    for number in range(evicted):
        block = manager.primary.allocate(keys(-1 - number), PROMOTION, chain, gone)
        assert block is not None
        assert gone == other[::-1]
    manager.primary.allocate(keys(-1 - evicted), PROMOTION, chain, gone)
    assert gone[evicted:] == own[-1:]
    manager.shutdown()


def test_a_store_does_not_evict_its_own_prefix(manager: TieringOffloadingManager) -> None:
    store(manager, keys(0, 1, 2, 3), "a")
    store(manager, keys(10, 11, 12, 13), "b")
    assert store(manager, keys(0, 1, 2, 3, 4, 5), "c") == keys(13, 12)


def test_touched_blocks_outlive_others(manager: TieringOffloadingManager) -> None:
    for number in range(8):
        store(manager, keys(number), f"r{number}")
    manager.touch(keys(0, 99), ReqContext("again"))
    assert store(manager, keys(20), "new") == keys(1)


def test_loading_what_is_not_ready_is_an_error_that_pins_nothing(manager: TieringOffloadingManager) -> None:
    store(manager, keys(1), "a")
    with pytest.raises(ValueError, match="not ready"):
        manager.prepare_load(keys(1, 2), ReqContext("a"))
    assert store(manager, keys(*range(10, 18)), "b") == keys(1)


def test_a_request_completes_only_its_own_stores(manager: TieringOffloadingManager) -> None:
    manager.prepare_store(keys(1), ReqContext("a"))
    manager.complete_store(keys(1), ReqContext("b"))
    assert manager.lookup(keys(1)[0], ReqContext("b")) is None, "a phantom: it is not written yet"
    manager.complete_store(keys(1), ReqContext("a"))
    assert manager.lookup(keys(1)[0], ReqContext("b")) is True


def test_completing_what_was_not_prepared_does_nothing(manager: TieringOffloadingManager) -> None:
    store(manager, keys(1), "a")
    manager.complete_load(keys(1, 2), ReqContext("a"))
    manager.complete_store(keys(1, 2), ReqContext("a"), success=False)
    assert manager.lookup(keys(1)[0], ReqContext("a")) is True


def test_events_tell_what_came_and_went(manager: TieringOffloadingManager) -> None:
    store(manager, keys(*range(8)), "a")
    store(manager, keys(8), "b")
    manager.reset_cache()
    events = [(event.removed, sorted(event.keys)) for event in manager.take_events()]
    assert events == [
        (False, sorted(keys(*range(8)))),
        (True, keys(7)),
        (False, keys(8)),
        (True, sorted(keys(*range(7), 8))),
    ]
    assert list(manager.take_events()) == []
    assert {event.medium for event in manager.take_events()} <= {"CPU"}


def test_a_request_without_an_id_works(manager: TieringOffloadingManager) -> None:
    context = ReqContext()
    assert manager.prepare_store(keys(1, 2), context) is not None
    manager.complete_store(keys(1, 2), ReqContext())
    manager.prepare_load(keys(1), ReqContext())
    manager.complete_load(keys(1), ReqContext())
    manager.on_request_finished(context)
    assert len(store(manager, keys(*range(10, 18)), "b")) == 2
