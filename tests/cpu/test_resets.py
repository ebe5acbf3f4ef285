"""A reset of the primary tier: however many blocks there are, it looks at few, and no row is lost or used twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.orphans import SWEEP_BLOCKS
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, CachePolicy
from tiered_kv.cpu.policies.recency import LRUPolicy
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.manager import TieringOffloadingManager

ROWS = 8 * SWEEP_BLOCKS
A_REQUEST = 64


class OldPolicy(LRUPolicy):
    """A policy of others, which knows nothing of `clear`."""

    clear = CachePolicy.clear


def keys_of(count: int, first: int = 0) -> list[OffloadKey]:
    return [make_offload_key(number.to_bytes(16, "big"), 0) for number in range(first, first + count)]


@pytest.fixture(params=[*BUILT_IN_POLICIES, f"{__name__}:OldPolicy"])
def manager(request: pytest.FixtureRequest) -> Iterator[TieringOffloadingManager]:
    region = PrimaryRegion(ROWS, 64)
    yield TieringOffloadingManager(PrimaryRows(CPUBackend(region), request.param))
    region.close()


def store(manager: TieringOffloadingManager, keys: list[OffloadKey], name: str = "") -> int:
    """Store blocks as requests do, and return how many were stored."""
    stored = 0
    for first in range(0, len(keys), A_REQUEST):
        context = ReqContext(f"{name}{first}-{manager.epoch}")
        part = keys[first : first + A_REQUEST]
        manager.on_new_request(context)
        output = manager.prepare_store(part, context)
        if output is not None:
            stored += len(output.keys_to_store)
            manager.complete_store(part, context)
        manager.on_request_finished(context)
        manager.on_schedule_end()
    return stored


def found(manager: TieringOffloadingManager, keys: list[OffloadKey]) -> int:
    context = ReqContext("look")
    hits = sum(manager.lookup(key, context) is True for key in keys)
    manager.on_request_finished(context)
    return hits


def test_a_reset_frees_few_rows_and_the_steps_after_it_the_others(
    manager: TieringOffloadingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(ROWS)
    assert store(manager, keys) == ROWS
    freed: list[int] = []
    free_rows = manager.primary.backend.free_rows

    def count(rows: list[int]) -> None:
        freed.append(len(rows))
        free_rows(rows)

    monkeypatch.setattr(manager.primary.orphans, "_free", count)
    manager.reset_cache()
    assert sum(freed) <= SWEEP_BLOCKS
    assert found(manager, keys) == 0
    assert manager.primary.snapshot()["used_blocks"] == 0
    while manager.primary.orphans.exist:
        freed.clear()
        manager.on_schedule_end()
        assert sum(freed) <= SWEEP_BLOCKS
    assert manager.primary.backend.get_num_free_blocks() == ROWS
    assert len(manager.primary.policy) == 0


def test_all_rows_can_be_used_at_once_after_a_reset(manager: TieringOffloadingManager) -> None:
    for number in range(4):
        keys = keys_of(ROWS, number * ROWS // 2)  # half of them are stored again, before their old rows are free
        assert store(manager, keys, str(number)) == ROWS
        assert found(manager, keys) == ROWS
        assert manager.primary.evicted_blocks == 0
        manager.reset_cache()
        assert found(manager, keys) == 0


def test_rows_in_use_at_a_reset_are_free_once_their_transfers_end(manager: TieringOffloadingManager) -> None:
    keys = keys_of(ROWS)
    store(manager, keys[: ROWS // 2])
    reads, writes = keys[:32], keys[ROWS // 2 : ROWS // 2 + 32]
    context = ReqContext("runs")
    manager.on_new_request(context)
    loaded = set(manager.prepare_load(reads, context).block_ids.tolist())
    output = manager.prepare_store(writes, context)
    assert output is not None
    written = set(output.store_spec.block_ids.tolist())  # type: ignore[attr-defined]
    manager.reset_cache()
    again = ReqContext("new")
    manager.on_new_request(again)
    assert manager.prepare_store([*reads, *writes], again).keys_to_store == []  # type: ignore[union-attr]
    store(manager, keys_of(ROWS, 10 * ROWS))
    used = {block.block_id for block in manager.primary.blocks.values()}
    assert used.isdisjoint(loaded | written)
    manager.complete_load(reads, context)
    manager.complete_store(writes, context)
    assert found(manager, [*reads, *writes]) == 0
    while manager.primary.orphans.exist:
        manager.on_schedule_end()
    assert len(manager.primary.blocks) + manager.primary.backend.get_num_free_blocks() == ROWS


def test_a_second_reset_comes_while_the_rows_of_the_first_are_not_free(manager: TieringOffloadingManager) -> None:
    keys = keys_of(ROWS)
    store(manager, keys)
    manager.reset_cache()
    store(manager, keys[: ROWS // 2])
    manager.reset_cache()
    assert found(manager, keys) == 0
    while manager.primary.orphans.exist:
        manager.on_schedule_end()
    assert manager.primary.backend.get_num_free_blocks() == ROWS
    assert store(manager, keys) == ROWS
