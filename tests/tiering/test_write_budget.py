"""A write budget: it is kept to in every hour, and goes to the requests whose blocks return."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stacks import stack_of
from tests.tiering.conftest import BLOCK_BYTES, LARGE_BUDGETS, MakeBench, keys
from tiered_kv.base import make_offload_key
from tiered_kv.config.settings import TierSettings
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering import write_budget
from tiered_kv.tiering.admission import Offer
from tiered_kv.tiering.write_budget import WINDOW_MINUTES, WriteBudget

HOUR_S = 3600.0
A_BLOCK_A_MINUTE = {**LARGE_BUDGETS, "write_budget": 24 * WINDOW_MINUTES * BLOCK_BYTES}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def blocks(request: str, count: int, first: int = 0) -> Offer:
    """Return blocks of a request from the position `first` on; requests of one name share them."""
    positions = list(range(first, first + count))
    keys = [make_offload_key(f"{request}/{position}".encode(), 0) for position in positions]
    return Offer(keys, positions, int)  # the block of a position is in the row of that number


def budget_of(hour_blocks: int, clock: Clock) -> WriteBudget:
    return WriteBudget(hour_blocks * BLOCK_BYTES, BLOCK_BYTES, clock)


OFFERS = st.lists(
    st.tuples(st.sampled_from((0.0, 1.0, 59.9, 60.0, 600.0, 3599.0, 3600.0, 9000.0)), st.integers(1, 300)), max_size=60
)


@given(OFFERS, st.integers(1, 400))
def test_no_hour_has_more_than_its_share(offers: list[tuple[float, int]], hour_blocks: int) -> None:
    clock, stored = Clock(), deque[tuple[float, int]]()
    budget = budget_of(hour_blocks, clock)
    for number, (pause_s, count) in enumerate(offers):
        clock.now_s += pause_s
        stored.append((clock.now_s, len(budget.select(blocks(str(number), count), 1000, str(number)).stored)))
        while stored[0][0] <= clock.now_s - HOUR_S:
            stored.popleft()
        assert sum(count for _, count in stored) <= hour_blocks


def test_it_begins_used_up_and_unused_budget_adds_up_to_an_hour() -> None:
    for pause_s, stored in ((0, 1), (59, 1), (60, 2), (600, 11), (HOUR_S, WINDOW_MINUTES), (1e6, WINDOW_MINUTES)):
        clock = Clock()
        budget = budget_of(WINDOW_MINUTES, clock)
        clock.now_s += pause_s
        assert len(budget.select(blocks("a", 100), 100, "a").stored) == stored
    assert budget.snapshot() == dict.fromkeys(
        ("write_budget_bytes", "write_budget_used_bytes"), WINDOW_MINUTES * BLOCK_BYTES
    )


def test_moved_blocks_count_from_the_next_minute_on() -> None:
    clock, moved = Clock(), iter((0, 5000, 7000, 0))
    budget = WriteBudget(100 * WINDOW_MINUTES * BLOCK_BYTES, BLOCK_BYTES, clock, lambda: next(moved))
    stored = []
    for pause_s in (HOUR_S, 60, 60, 2 * HOUR_S):
        clock.now_s += pause_s
        stored.append(len(budget.select(blocks(str(pause_s), 20), 100, str(clock.now_s)).stored))
    assert stored == [20, 20, 0, 20]


def test_a_request_is_stored_without_a_hole() -> None:
    clock = Clock()
    budget = budget_of(WINDOW_MINUTES * 10, clock)
    selection = budget.select(blocks("a", 8), 6, "a")
    assert selection.stored.rows == [0, 1, 2, 3, 4, 5]
    assert list(selection.late) == blocks("a", 8).keys[6:], "there is no room in flight"
    assert len(budget.select(blocks("b", 8), 100, "b").stored) == 4
    clock.now_s += HOUR_S
    assert not budget.select(blocks("b", 8, first=8), 100, "b").stored, "behind what was refused"
    assert len(budget.select(blocks("c", 8), 100, "c").stored) == 8


def test_the_count_of_moved_blocks_is_read_and_need_not_be_a_number(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, used in ((7, 7), ("many", 0), (None, 0)):
        bench = make_bench(A_BLOCK_A_MINUTE)
        monkeypatch.setattr(type(bench.tier), "relocated_blocks", said)  # of a third-party tier
        bench.clock.advance(2 * HOUR_S)
        bench.step()
        assert bench.counter("write_budget_used_bytes") == used * BLOCK_BYTES


@pytest.mark.parametrize("is_down", [True, False])
def test_blocks_over_the_store_budget_are_offered_again_before_later_ones(make_bench: MakeBench, is_down: bool) -> None:
    budget = 24 * WINDOW_MINUTES * 8 * BLOCK_BYTES
    bench = make_bench({"store_budget": 2 * BLOCK_BYTES, "write_budget": budget, "breaker_failures": 1})
    bench.clock.advance(HOUR_S)
    bench.store(keys(0, 1), bench.request("a"))
    if is_down:
        bench.end(success=False)
    context = bench.request("b")
    bench.store(keys(2, 3), context)
    assert bench.counter("skipped_blocks_total", "breaker" if is_down else "budget") == 2
    if not is_down:
        bench.end()
    bench.clock.advance(HOUR_S)
    bench.step()
    bench.store(keys(4), context)
    assert not bench.jobs, "behind what is not there"
    another = bench.request("c")
    bench.load(keys(2, 3), another)
    assert bench.jobs == [keys(2, 3)]
    bench.end()
    bench.store(keys(5), another)
    assert bench.jobs == [keys(5)]


def test_another_request_of_the_same_name_is_decided_anew(make_bench: MakeBench) -> None:
    bench = make_bench(A_BLOCK_A_MINUTE)
    for number in (0, 2):
        context = bench.request("a")
        bench.store(keys(number, number + 1), context)
        bench.manager.on_request_finished(context)
        bench.clock.advance(600)
    assert bench.jobs == [keys(0), keys(2, 3)]


def test_behind_a_refused_block_nothing_is_stored_after_a_load_without_refused_ones(make_bench: MakeBench) -> None:
    bench = make_bench(A_BLOCK_A_MINUTE)
    context = bench.request("a")
    bench.store(keys(0, 1), context)
    assert bench.jobs == [keys(0)]
    bench.load(keys(0), context)  # what is stored is not offered again
    bench.clock.advance(600)
    bench.store(keys(2), context)
    assert bench.jobs == [keys(0)]


def test_behind_a_refused_block_that_two_requests_load_at_once_nothing_is_stored(make_bench: MakeBench) -> None:
    bench = make_bench(A_BLOCK_A_MINUTE)
    for number in (0, 1):
        bench.store(keys(number), bench.request(str(number)))
    contexts = bench.request("a"), bench.request("b")
    for context in contexts:
        bench.manager.prepare_load(keys(1), context)
    for context in contexts:
        bench.manager.complete_load(keys(1), context)
    bench.clock.advance(600)
    bench.store(keys(2), contexts[0])
    assert bench.jobs == [keys(0)]


def test_behind_a_refused_promoted_block_nothing_is_stored(make_bench: MakeBench) -> None:
    bench = make_bench({**A_BLOCK_A_MINUTE, "fill_on_promotion": True}, LARGE_BUDGETS)
    bench.tiers[1].has(0, 1, 2)
    context = bench.request("a")
    for wanted in (keys(0, 1), keys(2)):
        bench.lookup(wanted, context)
        bench.step()
        bench.end()  # the promotion
        assert bench.jobs == ([keys(0)] if wanted == keys(0, 1) else [])
        while bench.jobs:
            bench.end()
        bench.load(wanted, context)
        bench.clock.advance(600)


def test_it_goes_to_the_requests_that_return() -> None:
    """Half of the requests go on from others and return in an hour; half are new and never do."""
    clock, chance = Clock(), random.Random(7)
    budget = budget_of(1200, clock)
    stored = {"new": 0, "next": 0}
    for number in range(2400):
        clock.now_s += 10
        kind = chance.choice(("new", "next"))
        offered = blocks(f"{kind}{number}", 8, first=0 if kind == "new" else 20)
        selected = budget.select(offered, 100, str(number)).stored
        returning = blocks(f"next{number - 40}", 8, first=20)
        budget.note_hits(returning.keys)
        if number >= 1200:
            stored[kind] += len(selected)
    assert stored["next"] > 8 * stored["new"]
    assert sum(stored.values()) * 3 <= 1200 * 12_000 / HOUR_S * 3


def test_a_refused_prefix_that_is_used_is_offered_again_with_later_blocks(make_bench: MakeBench) -> None:
    bench = make_bench({**LARGE_BUDGETS, "write_budget": 24 * WINDOW_MINUTES * 4 * BLOCK_BYTES})
    bench.store(keys(0, 1, 2, 3), bench.request("a"))
    assert bench.jobs == [keys(0, 1, 2, 3)]
    bench.end()
    bench.store(keys(4, 5), bench.request("b"))
    assert not bench.jobs
    assert bench.counter("skipped_blocks_total", "write_budget") == 2
    assert bench.counter("write_budget_used_bytes") == bench.counter("write_budget_bytes")
    bench.clock.advance(600)
    context = bench.request("c")
    bench.load(keys(4, 5), context)
    bench.store(keys(6), context)
    assert bench.jobs == [keys(4, 5), keys(6)]
    bench.load(keys(0, 1), bench.request("d"))
    bench.load(keys(4, 5), bench.request("e"))
    assert bench.jobs == [keys(4, 5), keys(6)], "what is stored is not offered again"


def test_a_stack_stores_the_head_of_a_prompt_over_its_budget(tmp_path: Path) -> None:
    a_minute, block_bytes = 4, 4096
    budget = f"{WINDOW_MINUTES * a_minute * block_bytes}B/h"
    tier = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB", "write_budget": budget}
    config = stack_of({**tier, "store_budget": 40 * block_bytes}, blocks=40)
    wanted = make_keys(30)
    with open_stack(config) as stack:
        assert stack.put(wanted, np.zeros((30, block_bytes), np.uint8), timeout=60) == 30
        assert stack.flush(60)
        counters = stack.counters()
        stored = count_of(counters, "nvme", "stored_blocks_total")
        assert stored in (a_minute, 2 * a_minute), "if a minute has passed meanwhile"
        assert count_of(counters, "nvme", "skipped_blocks_total", "write_budget") == 30 - stored
        fates = [explanation.tiers[1].fate for explanation in stack.explain(wanted)]
    assert fates == ["stored"] * stored + ["admission"] * (30 - stored)


def test_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_budget, "OFFERS_MAX", 2000)
    monkeypatch.setattr(write_budget, "REQUESTS_MAX", 500)
    budget = budget_of(1, Clock())
    for number in range(2100):
        budget.select(blocks(str(number), 1), 100, str(number))
    assert (len(budget._offers), len(budget._requests)) == (2000, 500)


def test_a_tier_has_one_way_of_admission() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        TierSettings(type="tier", admit_after=2, write_budget=1 << 40)
    given = {"type": "tier", "write_budget": "1TiB/day"}
    assert TierSettings.model_validate(given).shown()["write_budget"] == given["write_budget"]
