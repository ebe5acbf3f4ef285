"""No block is promoted that would arrive later than the engine computes it."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.tiering.conftest import LARGE_BUDGETS, Bench, MakeBench, keys
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.tiering.pace import CUT_BLOCKS_MIN, FIRST_LOADS, RETRY_MAX_S, RETRY_S, EngineCost, Pace
from tiered_kv.tiering.requests import ManagerLimits

NUMBERS = itertools.count(1000)
LOADS_MIN = len(FIRST_LOADS)
PATIENT = {**LARGE_BUDGETS, "job_timeout": 86400, "lookup_timeout": 60}
LIMITS = ManagerLimits(promotion_blocks_max=64, wait_max_s=3600, hold_s=3600)


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """A manager of an engine that computes ten blocks a second."""
    return make_bench(PATIENT, num_blocks=128, limits=LIMITS, compute_block_s=0.1)


def new_keys(size: int) -> list[OffloadKey]:
    return keys(*(next(NUMBERS) for _ in range(size)))


def begin(bench: Bench, size: int, tier: int = 0) -> tuple[list[OffloadKey], ReqContext]:
    """Look up new blocks that a tier has, for a new request, and end the step."""
    wanted = new_keys(size)
    bench.tiers[tier].present = dict.fromkeys(wanted, True)
    context = bench.request(str(wanted))
    bench.lookup(wanted, context)
    bench.step()
    return wanted, context


def ask(bench: Bench, size: int, load_s: float, tier: int = 0) -> list[bool | None]:
    """Look up blocks that a tier has and loads in `load_s`; return the answers after that."""
    wanted, context = begin(bench, size, tier)
    bench.clock.advance(load_s)
    if bench.tiers[tier].jobs:
        bench.tiers[tier].end()
    bench.step()
    answers = bench.lookup(wanted, context)
    bench.manager.on_request_finished(context)
    return answers


def test_a_tier_that_is_slower_than_computing_is_asked_no_more(make_bench: MakeBench) -> None:
    bench = make_bench(PATIENT, PATIENT, num_blocks=128, limits=LIMITS, compute_block_s=0.1)
    for size in (4, 8):
        assert ask(bench, size, load_s=1.0 * size) == [True] * size, "nothing is known yet"
    wanted = new_keys(4)
    bench.tier.present = dict.fromkeys(wanted, True)
    bench.manager.expect(4, context := bench.request("x"))
    assert bench.lookup(wanted, context) == [False] * 4, "at once, without a step"
    assert bench.counter("too_slow_blocks_total") == 4
    bench.tiers[1].present = bench.tier.present
    bench.manager.expect(4, context := bench.request("y"))
    assert bench.lookup(wanted, context) == [None] * 4
    bench.step()
    assert (len(bench.tiers[0].jobs), len(bench.tiers[1].jobs)) == (0, 1), "a faster tier below loads them"


def test_a_distant_tier_loads_only_prefixes_that_are_long_enough(bench: Bench) -> None:
    for size in (8, 15, 20, 25):
        assert ask(bench, size, load_s=1.0 + 0.01 * size) == [True] * size
    assert ask(bench, 5, load_s=1.05) == [False] * 5, "1.05 s, and computed in 0.5"
    assert bench.counter("too_slow_blocks_total") == 5
    assert not bench.jobs
    assert ask(bench, 20, load_s=1.2) == [True] * 20, "1.2 s, and computed in 2"


def test_the_estimate_can_be_read(bench: Bench) -> None:
    for size in (8, 15):
        assert bench.manager.counters()["tier0"]["expected_load_seconds"] == 0.0, "it is not known yet"
        ask(bench, size, load_s=1.0 + 0.01 * size)
    bench.manager.cost.growth_s, bench.manager.cost.backlog_s = 0.01, 2.5
    tier, cpu = bench.manager.counters()["tier0"], bench.manager.counters()["cpu"]
    assert tier["expected_load_seconds"] == pytest.approx(1.0)
    assert tier["expected_block_seconds"] == pytest.approx(0.01)
    assert [cpu[f"compute_{what}_seconds"] for what in ("block", "growth", "backlog")] == [0.1, 0.01, 2.5]
    bench.manager.cost.block_s = math.inf
    assert bench.manager.counters()["cpu"]["compute_block_seconds"] == 0.0, "nothing is compared"


def test_loads_of_one_size_are_no_reason_to_wait_longer_for_a_larger_one(bench: Bench) -> None:
    for _ in range(LOADS_MIN):
        assert ask(bench, 4, load_s=0.3) == [True] * 4
    assert ask(bench, 4, load_s=0.3) == [True] * 4
    assert ask(bench, 30, load_s=0.4) == [True] * 30, "2.25 s at most, and computed in 3"
    assert ask(bench, 30, load_s=0.4) == [True] * 30


def test_the_first_loads_of_a_tier_are_short_and_one_at_a_time(bench: Bench) -> None:
    for number, size in enumerate(FIRST_LOADS):
        wanted, context = begin(bench, 40)
        others, other = begin(bench, 4)
        assert [len(job) for job in bench.jobs] == [size]
        assert bench.lookup(others, other) == [False] * 4, "no request waits for what nobody knows"
        bench.clock.advance(0.01 * size)
        bench.end()
        assert bench.lookup(wanted, context) == [True] * size + [False] * (40 - size), "it computes the rest"
        bench.manager.on_request_finished(context)
        bench.manager.on_request_finished(other)
        skipped = sum(44 - each for each in FIRST_LOADS[: number + 1])
        assert bench.counter("too_slow_blocks_total") == bench.counter("too_slow_blocks_total", "learning") == skipped
    assert bench.counter("learning_jobs_total", "first") == LOADS_MIN
    assert ask(bench, 60, load_s=0.6) == [True] * 60


def test_loads_that_lack_a_few_blocks_teach_too(bench: Bench) -> None:
    for lacking in (5, 1, 1):
        wanted, context = begin(bench, 8)
        bench.clock.advance(0.1)
        bench.end(success=False, only=wanted[lacking:], reason="absent")
        bench.manager.on_request_finished(context)
    assert ask(bench, 40, load_s=0.5) == [True] * 40, "after two loads that had most"


def test_a_load_may_take_as_long_as_the_engine_is_busy(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    assert ask(bench, 20, load_s=0.0) == [False] * 20, "4 s, and computed in 2"
    bench.manager.cost.backlog_s = 2.1
    assert ask(bench, 20, load_s=4.0) == [True] * 20, "after 2.1 s of others' prompts"
    bench.manager.cost.notice_s = 0.2
    assert ask(bench, 20, load_s=4.0)[0] is True
    assert ask(bench, 20, load_s=4.0)[-1] is False, "4 s, 0.2 s more until it runs, and computed after 4.1"


def test_a_load_may_take_longer_if_computing_would_stall_others(bench: Bench) -> None:
    bench.manager.cost.block_s = 0.01
    for size in (4, 8):
        ask(bench, size, load_s=0.019 * size)
    for stalled, worth in ((0, False), (1, False), (2, True), (50, True)):
        bench.manager.cost.stalled = stalled
        assert ask(bench, 20, load_s=0.38) == [worth] * 20, "0.38 s, and computed in 0.2"
    waits_s = [EngineCost(0.01, stalled=stalled).saved_by(10) for stalled in (0, 1, 5, 50)]
    assert waits_s == pytest.approx([0.1, 0.16, 0.4, 0.4]), "a short prompt waits at most four times as long"
    assert EngineCost(0.5, stalled=50).saved_by(10) == pytest.approx(5.3), "and a long one 0.3 s longer"


FAST, SLOW = EngineCost(0.1), EngineCost(1.0)
"""What computing costs two engines of one manager."""


@pytest.mark.parametrize("costs", [(FAST, SLOW), (SLOW, FAST)], ids=["fast first", "slow first"])
@pytest.mark.parametrize("is_expected", [False, True])
def test_an_engine_s_speed_decides_its_own_loads_only(
    bench: Bench, costs: tuple[EngineCost, EngineCost], is_expected: bool
) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    asked = []
    for cost in costs:  # both in one step
        wanted, context = new_keys(10), bench.request(f"of {cost}")
        bench.tier.present |= dict.fromkeys(wanted, True)
        bench.manager.use_cost(cost, context)
        if is_expected:
            bench.manager.expect(len(wanted), context)
        bench.lookup(wanted, context)
        asked.append((wanted, context, cost))
    bench.step()
    assert [len(job) for job in bench.jobs] == [10], "2 s, and computed in 10 by one of them"
    bench.end()
    assert [bench.lookup(wanted, context) for wanted, context, _ in asked] == [[cost is SLOW] * 10 for cost in costs]


@pytest.mark.parametrize("costs", [(FAST, SLOW), (SLOW, FAST)], ids=["fast first", "slow first"])
def test_an_engine_that_computes_sooner_takes_no_block_from_another(
    bench: Bench, costs: tuple[EngineCost, EngineCost]
) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    wanted, contexts = new_keys(10), {id(cost): bench.request(f"of {cost}") for cost in costs}
    bench.tier.present = dict.fromkeys(wanted, True)
    for cost in costs:
        context = contexts[id(cost)]
        bench.manager.use_cost(cost, context)
        if cost is FAST and costs[0] is SLOW:
            bench.manager.expect(10, context)
        bench.lookup(wanted, context)
    bench.step()
    assert [len(job) for job in bench.jobs] == [10]
    assert bench.lookup(wanted, contexts[id(FAST)]) == [False] * 10, "it does not wait for what another waits for"
    bench.end()
    assert bench.lookup(wanted, contexts[id(SLOW)]) == [True] * 10


def test_a_prefix_is_cut_where_waiting_stops_paying(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    bench.manager.cost.backlog_s = 1.25
    answers = ask(bench, 40, load_s=2.4)
    assert answers == [True] * 12 + [False] * 28, "of 12 blocks, 2.4 s: 1.25 s of others' prompts, and 1.2 s saved"
    assert bench.counter("too_slow_blocks_total", "cut") == 28
    bench.manager.cost.backlog_s = 0.1 * (CUT_BLOCKS_MIN - 1) + 0.01
    assert ask(bench, 40, load_s=0.0) == [False] * 40, "too few to wait for"
    assert bench.manager.counters()["tier0"]["too_slow_blocks_total"] == {"cut": 28, "late": 40}


def test_no_row_is_taken_for_blocks_that_would_come_too_late(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    bench.manager.cost.backlog_s = 1.25
    wanted, context = new_keys(40), bench.request("cut")
    bench.tier.present = dict.fromkeys(wanted, True)
    bench.manager.expect(40, context)
    assert bench.lookup(wanted, context) == [None] * 12 + [False] * 28, "at once, without a step"
    assert bench.counter("too_slow_blocks_total", "cut") == 28
    bench.step()
    assert [len(job) for job in bench.jobs] == [12]
    assert bench.lookup(wanted, context) == [None] * 12 + [False] * 28
    bench.clock.advance(2.4)
    bench.end()
    assert bench.lookup(wanted, context) == [True] * 12 + [False] * 28
    assert bench.counter("too_slow_blocks_total") == 28
    bench.manager.expect(40, whole := bench.request("whole"), is_whole=True)
    wanted = new_keys(40)
    bench.tier.present = dict.fromkeys(wanted, True)
    assert bench.lookup(wanted, whole) == [False] * 40, "all of them would come too late"


def test_a_cut_prefix_that_waits_for_room_loads_as_many_blocks(make_bench: MakeBench) -> None:
    limits = ManagerLimits(promotion_blocks_max=20, wait_max_s=3600, hold_s=3600)
    bench = make_bench(PATIENT, num_blocks=128, limits=limits, compute_block_s=0.1)
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    bench.manager.cost.backlog_s = 4.0
    _, other = begin(bench, 20)
    assert len(bench.jobs) == 1
    wanted, context = new_keys(80), bench.request("cut")
    bench.tier.present = dict.fromkeys(wanted, True)
    bench.manager.cost.backlog_s = 4.0 + 1.25
    bench.manager.expect(80, context)
    for _ in range(3):
        assert bench.lookup(wanted, context)[0] is None, "the promotion budget is used up"
        bench.step()
    bench.clock.advance(4.0)
    bench.end()
    bench.manager.on_request_finished(other)
    assert bench.lookup(wanted, context)[:13] == [None] * 12 + [False]
    bench.step()
    assert [len(job) for job in bench.jobs] == [12]


def test_a_window_of_one_group_is_loaded_whole_or_not_at_all(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    bench.manager.cost.backlog_s = 2.1
    wanted, context = new_keys(40), bench.request("window")
    bench.tier.present = dict.fromkeys(wanted, True)
    bench.manager.expect(20, context, is_whole=True)
    assert bench.lookup(wanted, context) == [None] * 40, "20 come in time, and twice as many are asked for"
    bench.step()
    assert not bench.jobs, "a part of them is of no use"


def test_no_block_behind_a_cut_is_loaded_ahead(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.2 * size)
    bench.manager.cost.backlog_s = 1.25
    wanted, context = new_keys(60), bench.request("ahead")
    bench.tier.present = dict.fromkeys(wanted, True)
    bench.manager.prefetch(wanted[:24], context)
    bench.step()
    assert [len(job) for job in bench.jobs] == [12]
    bench.manager.cost.backlog_s = 100.0
    bench.manager.prefetch(wanted[24:], context)
    bench.step()
    assert [len(job) for job in bench.jobs] == [12], "the request would lack the blocks between"
    bench.clock.advance(2.4)
    bench.end()
    bench.manager.end_prefetch(context)
    assert bench.lookup(wanted, context) == [True] * 12 + [None] * 48, "it asks itself"
    bench.step()
    assert [len(job) for job in bench.jobs] == [48]


def test_requests_that_compute_let_others_wait_for_their_loads(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.15 * size)
    requests = [(new_keys(20), bench.request(name)) for name in "abc"]
    bench.tier.present = dict.fromkeys((key for wanted, _ in requests for key in wanted), True)
    for wanted, context in requests:
        bench.lookup(wanted, context)
    bench.step()
    assert [len(job) for job in bench.jobs] == [20], "3 s: the first is computed in 2, so the second may take 4"
    assert [bench.lookup(wanted, context)[0] for wanted, context in requests] == [False, None, False]


def test_stores_in_flight_slow_a_load_down(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.08 * size)
    assert ask(bench, 20, load_s=1.6) == [True] * 20
    bench.store(new_keys(20), bench.request("stores"))
    assert len(bench.jobs) == 1
    wanted, context = begin(bench, 20)
    assert bench.lookup(wanted, context) == [False] * 20, "3.2 s beside as many blocks of stores, and computed in 2"


def test_loads_in_flight_count(make_bench: MakeBench) -> None:
    bench = make_bench(PATIENT, num_blocks=128, limits=LIMITS, compute_block_s=0.11)
    for size in (8, 5, 10):
        assert ask(bench, size, load_s=0.05 * size) == [True] * size
    for _ in range(2):
        begin(bench, 10)
    assert len(bench.jobs) == 2, "0.5 and 1 s, and computed in 1.1"
    assert ask(bench, 10, load_s=0.0) == [False] * 10, "behind 20 others"


def test_a_slow_tier_is_tried_again_by_one_load_without_waiting_requests(bench: Bench) -> None:
    for _ in range(LOADS_MIN):
        ask(bench, 4, load_s=4.0)
    assert ask(bench, 4, load_s=0.0) == [False] * 4
    bench.clock.advance(RETRY_S)
    bench.step()
    requests = [(new_keys(4), bench.request(name)) for name in "ab"]
    bench.tier.present = dict.fromkeys(requests[0][0] + requests[1][0], True)
    for wanted, context in requests:
        bench.lookup(wanted, context)
    bench.step()
    assert len(bench.jobs) == 1
    for wanted, context in requests:
        assert bench.lookup(wanted, context) == [False] * 4, "they compute it"
    assert bench.manager.counters()["tier0"]["too_slow_blocks_total"] == {"late": 8, "try": 4}
    assert bench.manager.counters()["tier0"]["learning_jobs_total"] == {"first": LOADS_MIN, "try": 1}
    bench.clock.advance(1.0)  # of which the job takes the least part
    bench.tier.end(ended_s=bench.clock() - 0.99)
    bench.step()
    assert ask(bench, 4, load_s=0.01) == [True] * 4, "it is fast again, and used as before"
    assert bench.lookup(requests[0][0], bench.request("later")) == [True] * 4


def test_no_request_waits_for_the_try_of_another(bench: Bench) -> None:
    for _ in range(LOADS_MIN):
        ask(bench, 4, load_s=4.0)
    bench.clock.advance(RETRY_S)
    bench.step()
    wanted, first = begin(bench, 4)
    assert bench.lookup(wanted, first) == [False] * 4
    counted = bench.counter("too_slow_blocks_total")
    second = bench.request("second")
    assert bench.lookup(wanted, second) == [False] * 4, "the load takes 4 s, and computing 0.4"
    assert bench.lookup(wanted, second) == [False] * 4
    assert bench.counter("too_slow_blocks_total") == counted + 4, "once a request"
    bench.end()
    assert bench.lookup(wanted, second) == [True] * 4


@pytest.mark.parametrize("ended_s", [float("nan"), float("inf"), 0.0, -1e300])
def test_a_tier_of_another_clock_is_timed_by_its_report(bench: Bench, ended_s: float) -> None:
    bench.clock.advance(1000.0)
    bench.step()
    for _ in range(LOADS_MIN):
        begin(bench, 1)
        bench.clock.advance(4.0)
        bench.tier.end(ended_s=ended_s)
        bench.step()
    assert ask(bench, 1, load_s=4.0) == [False]


def test_a_request_that_asks_for_no_block_is_not_judged(bench: Bench) -> None:
    for size in (8, 15, 20):
        ask(bench, size, load_s=1.0 + 0.01 * size)
    for blocks in (0, -1):  # the engine has the rest of the prefix
        bench.manager.expect(blocks, context := bench.request("x"))
    assert bench.counter("too_slow_blocks_total") == 0
    bench.tier.has(*range(20))
    assert bench.lookup(keys(*range(20)), context) == [None] * 20, "1.2 s, and computed in 2"


def test_each_try_that_takes_as_long_as_before_doubles_the_time_to_the_next() -> None:
    pace, now_s = Pace(EngineCost(0.1)), 0.0
    for _ in range(LOADS_MIN):
        pace.add(4, 4.0, now_s)
    tries = []
    while now_s < 2000.0:
        now_s += 10.0
        if pace.tries(now_s):
            tries.append(now_s)
            pace.add(4, 4.0, now_s + 4.0)
    assert tries == [10.0, 40.0, 90.0, 180.0, 350.0, 680.0, 1290.0, 1900.0]
    assert pace.tries(now_s + RETRY_MAX_S)
    pace.add(4, 0.1, now_s + RETRY_MAX_S)
    assert pace.worth(4, 0, pace.cost.of, 0.0) == 4, "it is fast again"
    for _ in range(LOADS_MIN):
        pace.add(4, 40.0, now_s + RETRY_MAX_S)
    assert pace.tries(now_s + RETRY_MAX_S + RETRY_S), "and is tried as soon as at first"


def test_a_load_that_expires_counts_as_slow(make_bench: MakeBench) -> None:
    bench = make_bench(
        {**LARGE_BUDGETS, "job_timeout": 2, "breaker_failures": 100}, num_blocks=128, compute_block_s=0.1
    )
    for _ in range(LOADS_MIN):
        begin(bench, 2)
        bench.clock.advance(2.5)
        bench.step()
    assert ask(bench, 2, load_s=0.0) == [False] * 2
    assert bench.counter("too_slow_blocks_total") == 2


def test_blocks_of_several_groups_are_computed_together(bench: Bench) -> None:
    for size in (4, 8):
        ask(bench, size, load_s=0.06 * size)
    both = [make_offload_key(b"%d" % number, group) for number in range(4) for group in (0, 1)]
    bench.tier.present = dict.fromkeys(both, True)
    bench.lookup(both, bench.request("two groups"))
    bench.step()
    assert not bench.jobs, "eight blocks take 0.48 s, and their tokens 0.4"
    assert ask(bench, 8, load_s=0.48) == [True] * 8, "of one group they take 0.8 s"


def test_the_rest_of_a_prefix_on_its_way_comes_with_it(bench: Bench) -> None:
    for size in (8, 15, 20, 25):
        ask(bench, size, load_s=1.0 + 0.01 * size)
    context = bench.request("long")
    for numbers in (range(20), range(20, 25)):  # which a tier has found later
        bench.tier.has(*range(25))
        bench.lookup(keys(*numbers), context)
        bench.step()
    assert [len(job) for job in bench.jobs] == [20, 5]


@pytest.mark.parametrize("is_front", [False, True], ids=["behind", "in front"])
@pytest.mark.parametrize("asks_many", [False, True], ids=["lookup", "lookup_many"])
def test_a_slow_block_is_worth_the_blocks_behind_it(make_bench: MakeBench, asks_many: bool, is_front: bool) -> None:
    bench = make_bench(PATIENT, PATIENT, num_blocks=256, limits=LIMITS, compute_block_s=0.02)
    for size in (8, 15, 20, 25):
        assert ask(bench, size, load_s=0.001 * size) == [True] * size
        assert ask(bench, size, load_s=0.5, tier=1)
    bench.tiers[0].has(*range(60))
    bench.tiers[1].has(99)
    wanted, context = keys(99, *range(60)) if is_front else keys(*range(60), 99), bench.request("mixed")
    assert (bench.manager.lookup_many if asks_many else bench.lookup)(wanted, context) == [None] * 61
    bench.step()
    assert len(bench.tiers[0].jobs) == 1
    assert len(bench.tiers[1].jobs) == is_front, "0.5 s: one is computed in 0.02 s, and all of them in 1.22"


def test_a_part_ahead_that_is_too_short_for_the_way_does_not_cost_the_whole(bench: Bench) -> None:
    for size in (8, 15, 20, 25):
        ask(bench, size, load_s=1.0 + 0.01 * size)
    bench.tier.has(*range(58))
    second, context = keys(*range(28, 58)), bench.request("second")
    bench.manager.prefetch(keys(*range(28)), bench.request("first"))
    bench.manager.prefetch(second, context)
    bench.step()
    assert [len(job) for job in bench.jobs] == [28], "there is room for four more, which are computed sooner"
    bench.clock.advance(1.28)
    bench.end()
    bench.manager.end_prefetch(context)
    assert bench.lookup(second, context) == [None] * 30
    bench.step()
    assert [len(job) for job in bench.jobs] == [30]
    assert bench.counter("too_slow_blocks_total") == 0


def wait_for_answer(bench: Bench, size: int, lookup_s: float) -> list[bool | None]:
    """Look up blocks that a tier lacks, which it answers after `lookup_s`; return the answers of the step before."""
    wanted = new_keys(size)
    bench.tier.present = dict.fromkeys(wanted, None)
    context = bench.request(str(wanted))
    assert bench.lookup(wanted, context) == [None] * size
    for seconds in (0.0, lookup_s):
        bench.clock.advance(seconds)
        bench.step()
        answers = bench.lookup(wanted, context)
    bench.tier.has()
    bench.lookup(wanted, context)
    bench.manager.on_request_finished(context)
    return answers


def test_a_short_prompt_does_not_wait_for_answers_that_take_longer_than_computing_it(bench: Bench) -> None:
    assert wait_for_answer(bench, 10, lookup_s=0.5) == [None] * 10, "which take a second to compute"
    assert wait_for_answer(bench, 3, lookup_s=0.0) == [False] * 3, "at the second step"
    assert bench.counter("too_slow_blocks_total", "not_asked") == 3
    assert wait_for_answer(bench, 6, lookup_s=0.5) == [None] * 6


def test_a_tier_whose_answer_would_come_too_late_is_not_asked(bench: Bench) -> None:
    wait_for_answer(bench, 10, lookup_s=0.5)
    for blocks, answer in ((3, False), (6, None)):
        bench.tier.has(*range(blocks), answer=None)
        bench.manager.expect(blocks, context := bench.request(str(blocks)))
        assert bench.lookup(keys(*range(blocks)), context) == [answer] * blocks
        bench.manager.expect(blocks, context)  # as in each step
    assert bench.counter("too_slow_blocks_total", "not_asked") == 3
    bench.manager.cost.growth_s = 0.01
    bench.manager.expect(3, context := bench.request("behind 20 others"), before=20)
    bench.tier.has(1, 2, 3, answer=None)
    assert bench.lookup(keys(1, 2, 3), context) == [None] * 3, "which take 0.3 s more behind these"


def test_no_request_waits_longer_for_an_answer_than_for_computing(bench: Bench) -> None:
    assert wait_for_answer(bench, 10, lookup_s=0.9) == [None] * 10
    assert wait_for_answer(bench, 10, lookup_s=1.1) == [False] * 10
    assert wait_for_answer(bench, 10, lookup_s=0.0) == [False] * 10, "as long as the last one"
    bench.clock.advance(RETRY_S)
    bench.step()
    assert wait_for_answer(bench, 10, lookup_s=0.0) == [False] * 10, "which would cost more than a tenth"
    bench.clock.advance(RETRY_MAX_S)
    bench.step()
    assert wait_for_answer(bench, 3, lookup_s=0.2) == [None] * 3, "tried again after long"
    assert wait_for_answer(bench, 3, lookup_s=0.1) == [None] * 3, "it answers sooner now"


def test_every_block_is_promoted_if_the_compute_time_is_unknown(make_bench: MakeBench) -> None:
    bench = make_bench(PATIENT, num_blocks=128, limits=LIMITS)
    for _ in range(3 * LOADS_MIN):
        assert ask(bench, 2, load_s=100.0) == [True] * 2


@pytest.mark.parametrize(("load_s", "block_s"), [(0.0, 0.004), (0.05, 0.001), (0.2, 0.0)])
def test_it_learns_both_times_and_follows_them(load_s: float, block_s: float) -> None:
    pace = Pace(EngineCost(0.002))
    for number in range(200):
        size = 1 + number * 7 % 64
        before = (0.5, 0.1) if number < 100 else (load_s, block_s)
        pace.add(size, before[0] + before[1] * size, now_s=0.0)
    for size in (1, 8, 30, 40, 64, 120):
        is_worth = load_s + block_s * size <= 0.002 * size
        assert pace.worth(size, 0, pace.cost.of, 0.0) == (size if is_worth else 0)
