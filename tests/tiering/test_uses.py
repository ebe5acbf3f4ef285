"""Blocks that are used in memory: tiers below learn of it, and get again what they lack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiering.conftest import BLOCK_BYTES, JOB_TIMEOUT_S, LARGE_BUDGETS, Bench, ManualTier, keys
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import JobMetadata

TIME_S = 60.0
BYTES = 4096


class UseNoting(ManualTier):
    """Notes what it is told of uses, and says which of these blocks it lacks."""

    def __init__(self, view: memoryview, name: str) -> None:
        super().__init__(view, name)
        self.told: list[list[OffloadKey]] = []
        self.absent: list[OffloadKey] = []

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._maybe_raise("touch")
        assert not req_context.req_id
        self.told.append(list(keys))
        self.absent += [key for key in keys if key not in self.present]

    def take_absent(self) -> Iterable[OffloadKey]:
        self._maybe_raise("take_absent")
        absent, self.absent = self.absent, []
        return absent


def noting(*tiers: Mapping[str, object], num_blocks: int = 8) -> tuple[Bench, list[UseNoting]]:
    bench = Bench(*tiers, num_blocks=num_blocks, of_type=UseNoting)
    return bench, bench.tiers  # type: ignore[return-value]  # made by `of_type`


def step(bench: Bench, seconds: float = 1.0) -> None:
    bench.clock.advance(seconds)
    bench.manager.on_schedule_end()


def stored(bench: Bench, *numbers: int) -> None:
    """Have blocks in memory and in every tier."""
    bench.store(keys(*numbers), bench.request("first"))
    for tier in bench.tiers:
        tier.end()
    step(bench)


def test_every_tier_is_told_of_loads_from_memory_of_offered_blocks_and_of_touches() -> None:
    bench, tiers = noting(LARGE_BUDGETS, LARGE_BUDGETS)
    stored(bench, 0, 1, 2)
    for use in (
        lambda context: bench.load(keys(0, 1), context),
        lambda context: bench.store(keys(0, 1), context),
        lambda context: bench.manager.touch(keys(0, 1), context),
    ):
        for tier in tiers:
            tier.told.clear()
        use(bench.request("later"))  # type: ignore[no-untyped-call]  # a lambda
        step(bench)
        assert [tier.told for tier in tiers] == [[keys(0, 1)]] * 2


def test_a_hit_in_a_tier_is_a_use_in_those_below_it() -> None:
    bench, tiers = noting(LARGE_BUDGETS, LARGE_BUDGETS)
    for tier in tiers:
        tier.has(0)
    context = bench.request("reader")
    assert bench.lookup(keys(0), context) == [None]
    step(bench)
    tiers[0].end()
    step(bench)
    bench.load(keys(0), context)
    step(bench)
    assert tiers[1].told == [keys(0)]


def test_tiers_are_told_a_few_times_a_second_and_each_block_once() -> None:
    bench, (tier,) = noting(LARGE_BUDGETS)
    stored(bench, 0, 1)
    for _ in range(50):
        bench.load(keys(0, 1), bench.request("reader"))
        step(bench, 0.001)
    assert tier.told == []
    step(bench)
    assert tier.told == [keys(0, 1)]


def test_tiers_are_told_sooner_while_many_blocks_are_stored() -> None:
    bench, (tier,) = noting(LARGE_BUDGETS, num_blocks=16)
    stored(bench, 0)
    bench.load(keys(0), bench.request("reader"))
    bench.store(keys(1, 2, 3, 4), bench.request("new"))
    step(bench, 0.0)
    assert tier.told == [keys(0)]


def test_the_hottest_of_many_blocks_do_not_keep_the_others_from_being_told() -> None:
    bench, (tier,) = noting(LARGE_BUDGETS, num_blocks=2048)
    many = keys(*range(2000))
    stored(bench, *range(2000))
    for _ in range(4):
        bench.load(many, bench.request("reader"))
        step(bench)
    assert max(map(len, tier.told)) <= 512
    assert set().union(*tier.told) == set(many)


@pytest.mark.parametrize("use", ["load", "store", "touch"])
def test_what_a_full_budget_refused_is_stored_at_a_later_use(use: str) -> None:
    bench = Bench({"store_budget": 2 * BLOCK_BYTES})
    bench.store(keys(0, 1, 2, 3), bench.request("burst"))
    assert bench.counter("skipped_blocks_total", "budget") == 2
    bench.tier.end()
    for _ in range(5):
        step(bench)
    assert bench.jobs == [], "nothing is offered again without a use"
    context = bench.request("later")
    if use == "touch":
        bench.manager.touch(keys(0, 1, 2, 3), context)
    else:
        getattr(bench, use)(keys(0, 1, 2, 3), context)
    for _ in range(6):
        step(bench)
        if bench.tier.jobs:
            bench.tier.end()
    assert set(bench.tier.present) == set(keys(0, 1, 2, 3))
    assert bench.counter("offered_again_blocks_total") == 2
    assert bench.free == 4


def test_new_blocks_go_first_and_half_of_the_budget_is_left_to_them() -> None:
    bench = Bench({"store_budget": 4 * BLOCK_BYTES}, num_blocks=16)
    bench.store(keys(*range(12)), bench.request("burst"))
    bench.load(keys(*range(12)), bench.request("later"))
    step(bench)
    assert [len(job) for job in bench.jobs] == [4], "the tier is not idle"
    bench.tier.end()
    step(bench)
    assert bench.jobs == [keys(4, 5)]
    bench.store(keys(12, 13), bench.request("new"))
    assert bench.jobs == [keys(4, 5), keys(12, 13)]


@pytest.mark.parametrize("failure", ["exception", "failed", "expired", "breaker"])
def test_what_a_failing_tier_did_not_store_is_stored_at_a_later_use(failure: str) -> None:
    bench = Bench({"breaker_failures": 1, "breaker_cooldown": 1, **LARGE_BUDGETS})
    bench.tier.raises = "submit_store" if failure in ("exception", "breaker") else ""
    if failure == "breaker":
        bench.store(keys(7), bench.request("opens it"))
        bench.tier.raises = ""
    bench.store(keys(0, 1), bench.request("first"))
    bench.tier.raises = ""
    if failure == "failed":
        bench.tier.end(False, reason="io_error")
    elif failure == "expired":
        step(bench, JOB_TIMEOUT_S + 1)
        bench.tier.end(False)
    for _ in range(3):
        step(bench)
    bench.load(keys(0, 1), bench.request("later"))
    for _ in range(3):
        step(bench)
    assert bench.jobs == [keys(0, 1)]


def test_a_block_that_fails_again_and_again_is_offered_ever_more_rarely() -> None:
    bench = Bench({"breaker_failures": 1000, **LARGE_BUDGETS})
    bench.store(keys(0), bench.request("first"))
    bench.tier.end(False, reason="no_space")
    offers = 0
    for number in range(600):
        bench.load(keys(0), bench.request(f"reader{number}"))
        step(bench)
        if bench.tier.jobs:
            bench.tier.end(False, reason="no_space")
            offers += 1
    assert 5 <= offers <= 20


def test_a_block_that_the_tier_has_evicted_is_stored_again_when_it_is_used() -> None:
    bench, (tier,) = noting(LARGE_BUDGETS)
    stored(bench, 0, 1)
    tier.present.clear()
    step(bench)
    assert bench.jobs == []
    bench.load(keys(0, 1), bench.request("later"))
    step(bench)
    assert bench.jobs == [keys(0, 1)]


def test_a_tier_that_is_smaller_than_what_is_hot_is_not_written_without_end() -> None:
    bench, (tier,) = noting(LARGE_BUDGETS)
    stored(bench, *range(8))
    written = 0
    for number in range(1000):
        tier.present.clear()
        bench.load(keys(*range(8)), bench.request(f"reader{number}"))
        step(bench)
        while tier.jobs:
            written += len(tier.end().keys)
    assert written <= 64 + 8, "64 at once, and a primary tier an hour"


def test_a_block_whose_store_is_in_flight_is_not_offered_again() -> None:
    bench, _ = noting(LARGE_BUDGETS)
    context = bench.request("first")
    bench.store(keys(0), context)
    bench.load(keys(0), context)
    for _ in range(3):
        step(bench)
    assert bench.jobs == [keys(0)]


def test_a_promoted_block_stays_out_of_a_tier_above_that_does_not_take_promoted_blocks() -> None:
    bench, tiers = noting(LARGE_BUDGETS, LARGE_BUDGETS)
    tiers[1].has(0)
    context = bench.request("reader")
    assert bench.lookup(keys(0), context) == [None]
    step(bench)
    tiers[1].end()
    step(bench)
    bench.load(keys(0), context)
    for _ in range(3):
        step(bench)
    assert tiers[0].told == [keys(0)]
    assert bench.jobs == []


def test_admission_is_kept_for_blocks_that_are_used() -> None:
    bench, (tier,) = noting({"admit_after": 3, **LARGE_BUDGETS})
    bench.store(keys(0), bench.request("first"))
    bench.load(keys(0), bench.request("second"))
    for _ in range(3):
        step(bench)
    assert bench.jobs == []
    assert tier.told == [keys(0)]


def test_a_reset_forgets_what_is_to_be_told_and_stored() -> None:
    bench, (tier,) = noting({"store_budget": BLOCK_BYTES})
    bench.store(keys(0, 1), bench.request("burst"))
    bench.load(keys(0, 1), bench.request("later"))
    bench.manager.reset_cache()
    tier.end(False, reason="reset")
    for _ in range(3):
        step(bench)
    assert tier.told == []
    assert bench.jobs == []


@pytest.mark.parametrize("method", ["touch", "take_absent"])
def test_a_tier_that_raises_is_counted_and_used_on(method: str) -> None:
    bench, (tier,) = noting(LARGE_BUDGETS)
    stored(bench, 0)
    tier.raises = method
    bench.load(keys(0), bench.request("later"))
    step(bench)
    assert bench.counter("exceptions_total") >= 1
    tier.raises = ""
    bench.store(keys(1), bench.request("new"))
    assert bench.jobs == [keys(1)]


@pytest.mark.one_quick(2)
@pytest.mark.parametrize("tier_type", ["nvme", "fs", "memory"])
def test_what_every_request_uses_outlives_what_none_uses_again(tier_type: str, tmp_path: Path) -> None:
    place = {} if tier_type == "memory" else {"path": str(tmp_path / "kv")}
    config: dict[str, Any] = {
        "namespace": {"model": "m"},
        "block": {"bytes": BYTES},
        "primary": {"capacity": 64 * BYTES},
        "secondary": [
            {"type": tier_type, "capacity": "4MiB", "job_timeout": TIME_S, "lookup_timeout": TIME_S, **place}
        ],
    }
    hot, blocks = make_keys(8, "hot"), np.zeros((32, BYTES), np.uint8)
    with open_stack(config) as stack:
        for number in range(45):
            stack.get(hot, timeout=TIME_S)
            assert stack.put(hot, blocks[:8], timeout=TIME_S) == 8
            stack.put(make_keys(32, f"own{number}"), blocks, timeout=TIME_S)
            assert stack.flush(TIME_S)
        evicted = stack.counters()[tier_type]["tier"]["evicted_blocks_total"]
        assert evicted > 8, "the tier has turned over"
        if tier_type == "memory":
            for number in range(2):  # push it out of the primary tier
                stack.put(make_keys(32, f"last{number}"), blocks, timeout=TIME_S)
                assert stack.flush(TIME_S)
            assert stack.contains(hot, timeout=TIME_S) == 8
    if tier_type != "memory":
        with open_stack(config) as stack:
            assert stack.contains(hot, timeout=TIME_S) == 8


def test_nothing_is_stored_again_while_the_tiers_are_closed() -> None:
    class EndingAtShutdown(UseNoting):
        is_shut_down = False

        def submit_store(self, job_metadata: JobMetadata) -> None:
            assert not self.is_shut_down
            super().submit_store(job_metadata)

        def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
            assert not self.is_shut_down
            super().touch(keys, req_context)

        def shutdown(self) -> None:
            self.is_shut_down = True
            while self.jobs:
                self.end(False, reason="shutdown")

    bench = Bench({"store_budget": 2 * BLOCK_BYTES}, of_type=EndingAtShutdown)
    bench.store(keys(0, 1, 2, 3), bench.request("burst"))
    bench.load(keys(0, 1, 2, 3), bench.request("later"))
    step(bench)
    bench.clock.advance(TIME_S)
    bench.manager.shutdown(0.0)
    assert bench.manager.jobs_in_flight == 0, "else the memory stays mapped"
    assert bench.counter("exceptions_total") == 0
