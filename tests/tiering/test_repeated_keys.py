"""A key that stands twice in a call means the same as once. Answers and rows are for each place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.stacks import PATIENT, manager_of, stack_of
from tests.tiering.conftest import BLOCK_BYTES as BENCH_BYTES
from tests.tiering.conftest import LARGE_BUDGETS, Bench, MakeBench, keys
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.policies import BUILT_IN_POLICIES
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.write_budget import WINDOW_MINUTES

BLOCK_BYTES = 4096
ADMISSIONS: dict[str, dict[str, object]] = {
    "all": {},
    "second-offer": {"admit_after": 2},
    "no-budget": {"write_budget": 24 * BLOCK_BYTES},
    "small-budget": {"write_budget": 24 * WINDOW_MINUTES * 4 * BLOCK_BYTES},
    "large-budget": {"write_budget": "1 TiB/day"},
}
PER_PLACE = ("blocks_total", "misses_total", "ghost_hits_total", "unexplained_blocks_total", "restored_tokens_total")
"""Counters of what requests asked for, and in the primary tier, of what they loaded."""


def serve(stack: Stack, prompt: list[OffloadKey], req_id: str, times: int) -> list[OffloadKey]:
    """Serve a prompt as an engine does, with each key so often in each call; return the blocks that were loaded."""

    def each(wanted: list[OffloadKey]) -> list[OffloadKey]:
        return wanted + (times - 1) * wanted[::-1]

    manager, context = manager_of(stack), ReqContext(req_id)
    manager.on_new_request(context)
    manager.prefetch(each(prompt), context)
    manager.on_schedule_end()
    assert manager.drain_jobs(60.0)  # whether a load has ended by now must not depend on its thread
    answers = manager.lookup_many(each(prompt), context)
    while None in answers:
        assert manager.drain_jobs(60.0)
        manager.on_schedule_end()
        answers = manager.lookup_many(each(prompt), context)
    assert answers == each(answers[: len(prompt)])  # type: ignore[arg-type]  # of answers, too
    found = prompt[: answers.index(False)] if False in answers else prompt
    spec = manager.prepare_load(each(found), context)
    rows = np.asarray(spec.block_ids).tolist()
    assert rows == each(rows[: len(found)])
    manager.complete_load(each(found), context)
    output = manager.prepare_store(each(prompt), context)
    if output is not None:
        assert len(set(output.keys_to_store)) == len(output.keys_to_store)
        manager.complete_store(each(output.keys_to_store), context)
    manager.touch(each(prompt), context)
    manager.on_schedule_end()
    assert manager.drain_jobs(60.0)
    manager.on_request_finished(context)
    manager.on_schedule_end()
    return found


def state_after(times: int, policy: str, admission: Mapping[str, object]) -> tuple[object, dict[str, dict[str, Any]]]:
    """Return what was loaded, and the counters, after requests whose keys stand so often in each call."""
    tier = {"type": "memory", "capacity": "1 MiB", **PATIENT, **admission}
    shared = make_keys(4, "shared")
    with open_stack(stack_of(tier, blocks=8, block_bytes=BLOCK_BYTES, primary={"policy": policy})) as stack:
        loaded = [
            serve(stack, [*shared[: 1 + number % 4], *make_keys(3, f"own-{number % 5}")], f"request-{number}", times)
            for number in range(12)
        ]
        assert manager_of(stack).prepare_store(make_keys(8, "all rows"), ReqContext("last")), "a row is taken"
        counters = stack.counters()
    del counters["cpu"]["loaded_blocks_total"], counters["cpu"]["loaded_bytes_total"]
    counted = {
        name: {each: count for each, count in of_tier.items() if each not in PER_PLACE and "_seconds" not in each}
        for name, of_tier in counters.items()
    }
    return loaded, counted


@pytest.mark.one_quick(3)
@pytest.mark.parametrize("policy", sorted(BUILT_IN_POLICIES))
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_keys_twice_in_every_call_change_nothing(policy: str, admission: str) -> None:
    assert state_after(2, policy, ADMISSIONS[admission]) == state_after(1, policy, ADMISSIONS[admission])


def test_a_load_may_end_with_each_key_once(bench: Bench) -> None:
    context = bench.request("a")
    bench.store(keys(0, 1), context)
    bench.end()
    bench.manager.prepare_load(keys(0, 1, 0), context)
    assert not bench.has_room_for(*range(2, 10))
    bench.manager.complete_load(keys(0, 1), context)
    bench.step()
    assert bench.has_room_for(*range(2, 10))


@pytest.mark.parametrize("count", [8, 12])
def test_without_tiers_a_put_counts_each_block_once_against_the_memory(count: int) -> None:
    wanted = make_keys(8)
    with open_stack(stack_of(blocks=8, block_bytes=BLOCK_BYTES)) as stack:
        blocks = np.zeros((2 * count, BLOCK_BYTES), np.uint8)
        named = [wanted[place % 8] for place in range(2 * count)]
        assert stack.put(named, blocks) == 2 * count
        assert stack.put([*named, *make_keys(2, "more")], np.zeros((2 * count + 2, BLOCK_BYTES), np.uint8)) == 2 * count


def test_what_a_budget_refused_may_stand_twice_in_an_offer(make_bench: MakeBench) -> None:
    bench = make_bench({**LARGE_BUDGETS, "write_budget": 24 * BENCH_BYTES})
    context = bench.request("a")
    bench.store(keys(0), context)
    for _ in range(3):
        bench.load(keys(0, 0, 0), context)
    bench.step()
    assert not bench.jobs
