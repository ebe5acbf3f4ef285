"""The tiering manager, step by step: what goes down to the tiers, and what comes up from them."""

from __future__ import annotations

import pytest

from tests.tiering.conftest import BLOCK_BYTES, LARGE_BUDGETS, Bench, MakeBench, keys
from tiered_kv.base import OffloadKey, OffloadPolicy, ReqContext
from tiered_kv.tiering.requests import ManagerLimits

# Cascade.


def test_stored_blocks_cascade_and_stay_pinned_until_the_tier_has_them(bench: Bench) -> None:
    bench.store(keys(*range(8)), bench.request("a"))
    assert bench.jobs == [keys(*range(8))]
    assert not bench.tier.jobs[0].is_promotion
    assert not bench.has_room_for(9)
    bench.end()
    assert bench.has_room_for(9)
    assert bench.counter("stored_blocks_total") == 8
    assert bench.counter("stored_bytes_total") == 8 * BLOCK_BYTES


def test_admission_stores_a_block_when_it_is_offered_again(make_bench: MakeBench) -> None:
    bench = make_bench({"admit_after": 2})
    bench.store(keys(0, 1), bench.request("a"))
    assert not bench.jobs
    assert bench.counter("skipped_blocks_total", "admission") == 2
    bench.store(keys(*range(10, 18)), bench.request("b"))  # evicts them
    context = bench.request("c")
    bench.store(keys(1, 2), context)
    assert bench.jobs == [keys(1)]
    bench.load(keys(2), context)
    assert bench.jobs == [keys(1), keys(2)], "a block that is loaded is worth storing, too"


def test_a_request_level_tier_gets_the_whole_request_at_its_end(make_bench: MakeBench) -> None:
    bench = make_bench(policy=OffloadPolicy.REQUEST_LEVEL)
    bench.store(keys(0, 1), bench.request("earlier"))
    bench.manager.on_request_finished(ReqContext("earlier"))
    bench.end()
    context = ReqContext("a")
    assert bench.manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    output = bench.manager.prepare_store(keys(0, 1, 2, 3), context)
    assert output is not None
    assert output.keys_to_store == keys(2, 3)
    bench.manager.on_request_finished(context)
    assert not bench.jobs, "its last blocks are not written yet"
    bench.manager.complete_store(output.keys_to_store, context)
    assert bench.jobs == [keys(0, 1, 2, 3)]


def test_a_request_level_tier_that_counts_offers_gets_nothing_before_the_request_s_end(make_bench: MakeBench) -> None:
    bench = make_bench({**LARGE_BUDGETS, "admit_after": 2}, policy=OffloadPolicy.REQUEST_LEVEL)
    bench.store(keys(0, 1), bench.request("earlier"))
    bench.manager.on_request_finished(ReqContext("earlier"))
    context = bench.request("a")
    bench.load(keys(0, 1), context)
    assert not bench.jobs
    bench.store(keys(2), context)
    bench.manager.on_request_finished(context)
    assert bench.jobs == [keys(0, 1)]


def test_completing_a_load_twice_releases_no_other_pin(bench: Bench) -> None:
    context = bench.request("a")
    bench.store(keys(*range(8)), context)  # pinned by the cascade
    bench.manager.prepare_load(keys(0), context)
    for _ in range(3):
        bench.manager.complete_load(keys(0, 1), context)
    assert not bench.has_room_for(9), "the tier still reads them"
    bench.end()
    assert bench.has_room_for(9)


# Promotion.


def test_a_hit_below_is_promoted_once_for_all_who_ask(bench: Bench) -> None:
    bench.tier.has(1, 2)
    first, second = bench.request("a"), bench.request("b")
    assert bench.lookup(keys(1, 2, 3), first) == [None, None, False]
    assert bench.lookup(keys(1, 2), second) == [None, None]
    assert not bench.jobs, "submitted at the end of the step"
    bench.step()
    assert bench.jobs == [keys(1, 2)]
    assert bench.tier.jobs[0].is_promotion
    assert bench.lookup(keys(1, 2), first) == [None, None]
    bench.end()
    assert bench.lookup(keys(1, 2), first) == bench.lookup(keys(1, 2), second) == [True, True]
    assert bench.manager.hit_tier(keys(1)[0], first) == "tier0"
    assert bench.manager.hit_tier(keys(1)[0], bench.request("c")) == "cpu"
    assert bench.counter("loaded_blocks_total") == 2


@pytest.mark.parametrize("how", ["finished", "time"])
def test_a_promoted_block_that_is_not_loaded_is_released(bench: Bench, how: str) -> None:
    context = bench.promote(1)
    bench.end()
    if how == "finished":
        bench.manager.on_request_finished(context)
    else:
        bench.clock.advance(bench.limits.hold_s)
        bench.step()
        assert bench.counter("released_holds_total", tier="cpu") == 1
    assert bench.has_room_for(*range(10, 18))


def test_blocks_held_for_many_requests_count_once(make_bench: MakeBench) -> None:
    bench = make_bench(limits=ManagerLimits(promotion_blocks_max=3))
    bench.tier.has(1, 2, 3)
    waiting = [bench.request(f"r{number}") for number in range(10)]
    for context in waiting:
        assert bench.lookup(keys(1, 2), context) == [None, None]
    bench.step()
    bench.end()
    assert bench.counter("promotion_blocks", tier="cpu") == 2
    assert bench.lookup(keys(3), bench.request("other")) == [None]
    bench.step()
    assert len(bench.jobs) == 1
    for context in waiting:
        bench.manager.on_request_finished(context)
    assert bench.counter("promotion_blocks", tier="cpu") == 1


@pytest.mark.parametrize("tier_raises", [False, True])
def test_lookup_many_answers_like_lookup(make_bench: MakeBench, tier_raises: bool) -> None:
    answers: list[object] = []
    for many in (False, True):
        bench = make_bench({}, {})
        bench.store(keys(1), bench.request("a"))
        bench.manager.prepare_store(keys(2), bench.request("a"))
        bench.tiers[0].present.update({**dict.fromkeys(keys(3, 3), True), **dict.fromkeys(keys(4), None)})
        bench.tiers[1].present.update(dict.fromkeys(keys(3, 5), True))
        bench.tiers[0].raises = "lookup" if tier_raises else ""
        wanted, context = keys(1, 2, 3, 3, 4, 5, 6, 1), bench.request("b")
        answers.append(bench.manager.lookup_many(wanted, context) if many else bench.lookup(wanted, context))
        bench.step()
        answers.append([sorted(key for job in tier.jobs for key in job.keys) for tier in bench.tiers])
    assert answers[:2] == answers[2:]


# Recency.


def evicted_by_a_new_block(bench: Bench) -> list[OffloadKey]:
    output = bench.manager.prepare_store(keys(100), bench.request("new"))
    assert output is not None
    return output.evicted_keys


def test_the_end_of_a_cascade_makes_no_block_recent(bench: Bench) -> None:
    bench.store(keys(0, 1, 2, 3), bench.request("old"))
    bench.store(keys(4, 5, 6, 7), bench.request("recent"))
    bench.tier.jobs.reverse()
    bench.end()
    bench.end()
    assert evicted_by_a_new_block(bench) == keys(3)


def test_the_end_of_a_promotion_makes_no_block_recent(bench: Bench) -> None:
    context = bench.promote(0, 1)
    bench.store(keys(2, 3, 4, 5, 6, 7), bench.request("recent"))
    bench.manager.on_request_finished(context)
    bench.tier.jobs.reverse()
    bench.end()
    bench.end()
    assert evicted_by_a_new_block(bench) == keys(1)


def test_promoted_blocks_have_the_places_that_the_engine_tells(bench: Bench) -> None:
    context = bench.request("a")
    order = keys(0, 1, 2, 3, 4, 5)  # two groups of three blocks
    for number, key in enumerate(order):
        context.set_offload_key_position(key, 16 * (number % 3 + 1))
    bench.tier.has(*range(6))
    bench.lookup(order, context)
    bench.step()
    assert [order.index(key) % 3 for key in bench.jobs[0]] == [0, 0, 1, 1, 2, 2], "a tier reads them in this order, too"
    bench.end()
    bench.manager.on_request_finished(context)
    gone = []
    for number in range(100, 107):
        output = bench.manager.prepare_store(keys(number), bench.request(f"{number}"))
        assert output is not None
        gone += output.evicted_keys
    assert [order.index(key) % 3 for key in gone] == [2, 2, 1, 1, 0]
