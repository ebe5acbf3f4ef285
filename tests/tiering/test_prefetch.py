"""What is promoted for requests that wait for their turn, and what that may cost others."""

from __future__ import annotations

import pytest

from tests.tiering.conftest import LARGE_BUDGETS, Bench, MakeBench, keys
from tiered_kv.base import ReqContext
from tiered_kv.tiering.prefetch import PREFETCH_KEYS
from tiered_kv.tiering.requests import ManagerLimits

LIMITS = ManagerLimits(promotion_blocks_max=8)
AHEAD = 4
"""Blocks that may be prefetched under these limits."""


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench(num_blocks=16, limits=LIMITS)


def expect(bench: Bench, name: str, *numbers: int) -> ReqContext:
    """Let a request wait for its turn, and a step pass."""
    context = bench.request(name)
    bench.manager.prefetch(iter(keys(*numbers)), context)
    bench.step()
    return context


def test_a_prefetch_ends_at_the_first_miss(bench: Bench) -> None:
    bench.tier.has(1, 2, 4)
    context = expect(bench, "a", 1, 2, 3, 4)
    bench.end()
    bench.step()
    assert not bench.jobs
    assert bench.lookup(keys(1, 2, 3), context) == [True, True, False]


def test_prefetched_blocks_are_bounded_until_a_request_loads_them(bench: Bench) -> None:
    bench.tier.has(*range(1, 13))
    first, _ = expect(bench, "a", 1, 2, 3, 4, 5, 6), expect(bench, "b", 7, 8, 9)
    assert bench.jobs == [keys(1, 2, 3, 4)]
    bench.end()
    bench.step()
    assert not bench.jobs
    assert bench.lookup(keys(1, 2, 3, 4), first) == [True] * AHEAD
    bench.load(keys(1, 2, 3, 4), first)
    bench.step()
    assert bench.jobs == [keys(7, 8, 9)], "the other one's turn; the first asks for the rest itself"


def test_a_request_that_is_never_scheduled_keeps_nothing_for_long_and_replaces_nothing_more(bench: Bench) -> None:
    bench.tier.has(*range(1, 10))
    expect(bench, "a", 1, 2, 3, 4)
    expect(bench, "b", 5, 6, 7, 8)
    bench.end()
    assert not bench.has_room_for(*range(100, 116))
    bench.clock.advance(LIMITS.hold_s + 1)
    bench.step()
    assert bench.has_room_for(*range(100, 116)), "nothing is pinned"
    bench.step()
    assert not bench.jobs, "what waits behind it does not replace what is needed sooner"


@pytest.mark.parametrize("how", ["finished", "scheduled", "too many"])
def test_the_room_of_a_request_that_leaves_the_queue_is_another_s(make_bench: MakeBench, how: str) -> None:
    bench = make_bench(num_blocks=16, limits=ManagerLimits(promotion_blocks_max=8, requests_max=2))
    bench.tier.has(*range(1, 10))
    first = expect(bench, "a", 1, 2, 3, 4, 5)
    expect(bench, "b", 6, 7)
    if how == "finished":
        bench.manager.on_request_finished(first)
    elif how == "scheduled":
        bench.manager.end_prefetch(first)
    else:
        bench.request("c")  # and the oldest is forgotten
    bench.step()
    assert bench.jobs == [keys(1, 2, 3, 4), keys(6, 7)]
    bench.end()
    bench.end()
    bench.manager.on_request_finished(first)
    bench.manager.on_request_finished(ReqContext("b"))
    assert bench.has_room_for(*range(100, 116)), "nothing is held for requests that ended"


def test_ready_blocks_are_held_for_a_queued_request(bench: Bench) -> None:
    bench.store(keys(1, 2), bench.request("before"))
    bench.tier.end()
    bench.step()
    context = expect(bench, "a", 1, 2, 3)
    assert not bench.has_room_for(*range(100, 115))
    assert bench.lookup(keys(1, 2), context) == [True, True]
    bench.manager.on_request_finished(context)
    bench.step()
    assert bench.has_room_for(*range(100, 116))


def test_a_step_looks_up_a_bounded_number_of_keys(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=1024, limits=ManagerLimits(promotion_blocks_max=1024))
    wanted = range(PREFETCH_KEYS * 2 // 3)
    for name in "abc":
        bench.manager.prefetch(iter(keys(*wanted)), bench.request(name))
    bench.tier.has(*wanted, answer=None)
    for _ in range(4):
        bench.step()
        assert 0 < len(bench.tier.asked) <= PREFETCH_KEYS
        bench.tier.asked.clear()
    bench.tier.has(*wanted)
    bench.step()
    bench.step()
    assert bench.jobs == [keys(*wanted)]


def test_keys_that_no_step_had_room_for_are_not_even_made(bench: Bench) -> None:
    made = []

    def endless() -> object:
        for number in range(1000):
            made.append(number)
            yield keys(number)[0]

    bench.tier.has(*range(1000))
    bench.manager.prefetch(endless(), bench.request("a"))  # type: ignore[arg-type]  # a generator of keys
    for _ in range(3):
        bench.step()
    assert made == list(range(AHEAD))


def test_a_reset_ends_prefetches(bench: Bench) -> None:
    bench.tier.has(*range(1, 10))
    context = expect(bench, "a", *range(1, 10))
    bench.manager.reset_cache()
    bench.tier.has(*range(1, 10))
    bench.end()
    bench.step()
    assert not bench.jobs
    expect(bench, "b", 1, 2)
    assert bench.jobs == [keys(1, 2)], "the room is free again"
    bench.manager.on_request_finished(context)


def test_time_in_the_queue_does_not_count_as_waiting(make_bench: MakeBench) -> None:
    bench = make_bench({**LARGE_BUDGETS, "lookup_timeout": 60}, limits=ManagerLimits(wait_max_s=2.0))
    bench.tier.has(1, answer=None)
    context = expect(bench, "a", 1)
    for _ in range(10):
        bench.clock.advance(0.5)
        bench.step()
    bench.tier.has(1)
    assert bench.lookup(keys(1), context) == [None], "its promotion begins"


def test_a_failing_tier_does_not_stop_prefetches_from_others(make_bench: MakeBench) -> None:
    bench = make_bench(LARGE_BUDGETS, LARGE_BUDGETS, num_blocks=16, limits=LIMITS)
    bench.tiers[0].raises = "lookup"
    bench.tiers[1].has(1, 2)
    expect(bench, "a", 1, 2)
    assert bench.jobs == [keys(1, 2)]


@pytest.mark.parametrize("how", ["behind a miss", "without a step", "compared with computing"])
def test_time_in_the_queue_does_not_count_as_a_tier_s_time_to_answer(make_bench: MakeBench, how: str) -> None:
    bench = make_bench(
        {**LARGE_BUDGETS, "lookup_timeout": 5 if how != "compared with computing" else 60},
        num_blocks=16,
        limits=LIMITS,
        compute_block_s=0.1,
    )
    bench.tier.has(1, 2, answer=None)
    context = expect(bench, "a", 1, 2)
    if how == "behind a miss":
        bench.tier.has()
        bench.step()
    bench.clock.advance(30.0)
    if how != "without a step":
        bench.step()
    if how != "behind a miss":
        bench.manager.end_prefetch(context)
    bench.tier.has(1, 2, answer=None)
    assert bench.lookup(keys(1, 2), context) == [None] * 2
    assert bench.counter("lookup_timeouts_total") == bench.counter("too_slow_blocks_total") == 0


def test_a_prefetch_waits_for_room(bench: Bench) -> None:
    bench.tier.has(*range(1, 13))
    other = bench.request("other")
    bench.lookup(keys(*range(1, 8)), other)
    bench.step()
    context = expect(bench, "a", 8, 9, 10)
    assert bench.jobs == [keys(*range(1, 8)), keys(8)]
    bench.end()
    bench.load(keys(*range(1, 8)), other)
    bench.step()
    assert bench.jobs == [keys(8), keys(9, 10)]
    assert bench.counter("refused_promotion_blocks_total") == 0
    bench.manager.on_request_finished(context)
