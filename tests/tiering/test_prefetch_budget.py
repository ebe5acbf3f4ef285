"""What useless prefetch orders cost, and that useful ones lose nothing by it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiering.conftest import BLOCK_BYTES, Bench, MakeBench, keys
from tests.tiering.test_orders import counted, end_all, give, limits, outcome
from tiered_kv.cpu.chain import OldChain
from tiered_kv.tiering.order import PrefetchOrder
from tiered_kv.tiering.prefetch_budget import LEAST_BLOCKS, LEAST_SHARE, PROBE_S, PrefetchBudget

BUDGET = 64
LEAST = max(LEAST_BLOCKS, BUDGET // LEAST_SHARE)
_blocks = itertools.count(0, BUDGET)


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench(num_blocks=1024, limits=limits(512, BUDGET))


def budget(bench: Bench) -> int:
    """Return what orders may load, as the metric has it."""
    return bench.counter("prefetch_budget_bytes", tier="cpu") // BLOCK_BYTES


def ordered(bench: Bench, until_s: float = 1.0) -> tuple[PrefetchOrder, list[int]]:
    """Return an order of as many blocks as the whole budget, of which those have come that may, and these."""
    first = next(_blocks)
    numbers = list(range(first, first + BUDGET))
    bench.tier.has(*numbers)
    order = give(bench, *numbers, until_s=until_s)
    end_all(bench)
    in_memory = [number for number in numbers if keys(number)[0] in bench.primary.index]
    return order, in_memory


def use(bench: Bench, numbers: list[int]) -> None:
    context = bench.request(f"request-{next(_blocks)}")
    assert bench.lookup(keys(*numbers), context) == [True] * len(numbers)
    bench.load(keys(*numbers), context)


def pass_time(bench: Bench, seconds: float = 1.5) -> None:
    bench.clock.advance(seconds)
    bench.step()


def make_small(bench: Bench) -> None:
    for _ in range(20):
        ordered(bench)
        pass_time(bench)
    assert budget(bench) == LEAST


def test_useless_orders_soon_load_next_to_nothing(bench: Bench) -> None:
    loaded = []
    for _ in range(30):
        _, came = ordered(bench)
        loaded.append(len(came))
        pass_time(bench)
    assert loaded[:4] == [BUDGET, BUDGET // 2, BUDGET // 4, BUDGET // 8]
    assert loaded == sorted(loaded, reverse=True)
    assert loaded[-10:] == [LEAST] * 10
    assert sum(loaded) <= 2 * BUDGET + 30 * LEAST
    assert outcome(bench, "unused") == sum(loaded)


def test_useless_orders_that_wait_together_load_no_more_than_those_that_come_one_by_one(bench: Bench) -> None:
    numbers = [next(_blocks) for _ in range(40)]
    bench.tier.present = dict.fromkeys(keys(*(first + at for first in numbers for at in range(BUDGET))), True)
    for at, first in enumerate(numbers):
        give(bench, *range(first, first + BUDGET), until_s=1.0 + at / 10)
    for _ in range(60):
        end_all(bench)
        pass_time(bench, 0.1)
    assert not bench.manager.orders.exist
    assert outcome(bench, "unused") <= 2 * BUDGET + 4 * LEAST


def test_orders_whose_blocks_are_used_always_have_the_whole_budget(bench: Bench) -> None:
    for _ in range(30):
        _, came = ordered(bench)
        assert len(came) == budget(bench) == BUDGET
        use(bench, came)
        pass_time(bench)
    assert outcome(bench, "used") == 30 * BUDGET


def test_a_third_of_used_blocks_is_enough(bench: Bench) -> None:
    for _ in range(30):
        _, came = ordered(bench)
        use(bench, came[: BUDGET // 3 + 1])
        assert len(came) == budget(bench) == BUDGET
        pass_time(bench)
    assert outcome(bench, "unused") == 30 * (BUDGET - BUDGET // 3 - 1)


def test_it_grows_back_within_a_few_orders_whose_blocks_are_used(bench: Bench) -> None:
    make_small(bench)
    sizes = []
    for _ in range(6):
        _, came = ordered(bench)
        sizes.append(len(came))
        use(bench, came)
        pass_time(bench)
    assert sizes == [LEAST, 2 * LEAST, 4 * LEAST, 8 * LEAST, 16 * LEAST, BUDGET][: len(sizes)]


def test_what_a_router_lets_go_itself_and_what_is_held_do_not_count(bench: Bench) -> None:
    for _ in range(10):
        order, came = ordered(bench, until_s=60.0)
        assert len(came) == budget(bench) == BUDGET
        bench.manager.orders.drop(order.name)
        bench.step()
    order, came = ordered(bench, until_s=60.0)
    pass_time(bench, 59.0)
    assert counted(order) == {"in_memory": BUDGET}
    assert budget(bench) == BUDGET
    assert outcome(bench, "unused") == 10 * BUDGET


def test_blocks_that_are_not_loaded_take_nothing_of_the_budget(bench: Bench) -> None:
    for _ in range(3):
        numbers = range(first := next(_blocks), first + BUDGET)
        bench.tier.has(*numbers)
        order = give(bench, *numbers)
        for _ in range(30):
            bench.step()
            while bench.tier.jobs:
                bench.tier.end(success=False, only=list(bench.tier.jobs[0].keys)[:1], reason="corrupt")
        assert order.counts()["absent"] > BUDGET // 2
        bench.manager.orders.drop(order.name)
        bench.step()
    assert len(ordered(bench)[1]) == budget(bench) == BUDGET


def test_orders_that_end_while_they_wait_leave_nothing_waiting(bench: Bench) -> None:
    make_small(bench)
    ordered(bench, until_s=60.0)
    for _ in range(30):
        bench.manager.orders.drop(ordered(bench, until_s=60.0)[0].name)
    bench.step()
    assert not bench.manager.orders._queued
    assert len(bench.manager.orders._orders) == 1


def test_what_a_request_has_no_room_beside_counts_as_unused(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=BUDGET, limits=limits(BUDGET, BUDGET))
    ordered(bench, until_s=60.0)
    assert bench.has_room_for(*range(1_000_000, 1_000_000 + BUDGET // 2))
    assert outcome(bench, "unused") == BUDGET // 2
    assert budget(bench) == BUDGET - BUDGET // 4


def test_blocks_in_memory_are_held_though_few_may_be_loaded(bench: Bench) -> None:
    make_small(bench)
    numbers = list(range(1_000_000, 1_000_000 + BUDGET))
    bench.store(keys(*numbers), bench.request("a"))
    end_all(bench)
    order = give(bench, *numbers)
    end_all(bench)
    assert counted(order) == {"in_memory": BUDGET}


def test_orders_that_end_before_their_turn_have_cost_no_lookups(bench: Bench) -> None:
    make_small(bench)
    bench.tier.asked.clear()
    orders = [ordered(bench, until_s=1.0 + number / 1000)[0] for number in range(40)]
    pass_time(bench, 0.5)
    assert len(bench.tier.asked) == BUDGET, "of one order"
    assert sum(order.counts()["coming"] for order in orders) == 40 * BUDGET - LEAST
    pass_time(bench, 2.0)
    assert not bench.manager.orders.exist
    assert len(bench.tier.asked) == BUDGET


def test_the_newest_order_comes_first_while_little_may_be_loaded(bench: Bench) -> None:
    make_small(bench)
    last = [ordered(bench, until_s=until_s)[0] for until_s in (0.5, 20.0, 20.0)][-1]
    bench.tier.has(*range(next(_blocks)))
    pass_time(bench, 0.7)
    end_all(bench)
    assert last.counts()["in_memory"] == LEAST


def test_a_useless_order_that_stays_keeps_no_newer_one_from_its_turn(bench: Bench) -> None:
    make_small(bench)
    useless, _ = ordered(bench, until_s=60.0)
    for number in range(10):
        pass_time(bench, PROBE_S)
        blocks = list(range(1_000_000 + 2 * number, 1_000_002 + 2 * number))
        bench.tier.has(*blocks)
        order = give(bench, *blocks, until_s=5.0)
        end_all(bench)
        assert counted(order) == {"in_memory": 2}
        use(bench, blocks)
    assert budget(bench) > LEAST
    assert useless.counts()["in_memory"] >= LEAST


@pytest.mark.parametrize("blocks", [LEAST, BUDGET])
def test_orders_load_the_least_at_a_time_beside_those_that_stay(bench: Bench, blocks: int) -> None:
    make_small(bench)
    before = outcome(bench, "unused")
    orders = []
    for _ in range(40):
        first = next(_blocks)
        bench.tier.has(*range(first, first + blocks))
        orders.append(give(bench, *range(first, first + blocks), until_s=60.0))
        end_all(bench)
        pass_time(bench, PROBE_S / 4)
    assert sum(order.counts()["in_memory"] for order in orders) <= 11 * LEAST
    pass_time(bench, 60.0)
    assert outcome(bench, "unused") - before <= 11 * LEAST


def test_a_warm_start_that_waits_keeps_no_order_from_its_turn(bench: Bench) -> None:
    make_small(bench)
    waiting = range(1_000_000, 1_000_000 + 1000)
    bench.tier.has(*waiting, answer=None)
    bench.manager.orders.give(PrefetchOrder("warm", keys(*waiting), bench.clock() + 60.0, chain=OldChain(1)))
    bench.step()
    wanted = range(2_000_000, 2_000_000 + LEAST)
    bench.tier.present.update(dict.fromkeys(keys(*wanted), True))
    order = give(bench, *wanted)
    end_all(bench)
    assert counted(order) == {"in_memory": LEAST}


def test_a_load_that_two_orders_wait_for_counts_though_the_first_is_ended(bench: Bench) -> None:
    bench.tier.has(1, 2)
    first = give(bench, 1, 2)
    bench.step()
    second = give(bench, 1, 2)
    bench.step()
    bench.manager.orders.drop(first.name)
    end_all(bench)
    assert counted(second) == {"in_memory": 2}
    assert outcome(bench, "unused") == 0
    use(bench, [1, 2])
    assert outcome(bench, "used") == 2


def test_a_request_that_comes_before_its_order_leaves_nothing_to_hold(bench: Bench) -> None:
    """Else its blocks would fill the budget, and the orders of later requests would find it full."""
    make_small(bench)
    other, _ = ordered(bench, until_s=20.0)
    order, _ = ordered(bench, until_s=20.0)
    numbers = list(range(1_000_000, 1_000_000 + 8))
    late = give(bench, *numbers, until_s=20.0)
    bench.step()
    bench.store(keys(*numbers), bench.request("computes"))
    for each in (other, order):
        bench.manager.orders.drop(each.name)
    end_all(bench)
    assert counted(late) == {"used": len(numbers)}


def test_a_warm_start_goes_on_beside_useless_orders(bench: Bench) -> None:
    make_small(bench)
    ordered(bench, until_s=60.0)
    numbers = range(1_000_000, 1_000_000 + BUDGET)
    bench.tier.has(*numbers)
    order = PrefetchOrder("warm", keys(*numbers), bench.clock() + 60.0, chain=OldChain(1))
    bench.manager.orders.give(order)
    end_all(bench)
    assert order.is_ended
    assert counted(order) == {"in_memory": BUDGET}


@given(
    setting=st.integers(1, 300),
    ends=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["use", "in vain", "let go", "fail"])), max_size=400),
)
def test_the_limit_stays_between_the_least_and_the_setting(setting: int, ends: list[tuple[int, str]]) -> None:
    found = PrefetchBudget(lambda: setting)
    least = min(setting, max(LEAST_BLOCKS, setting // LEAST_SHARE))
    for number, end in ends:
        key, before = keys(number)[0], found.blocks_max
        found.begin(key)
        if end == "fail":
            found.fail(key)
        else:
            found.arrive(key)
            found.use(key) if end == "use" else found.let_go(key, is_in_vain=end == "in vain")
        assert least <= found.blocks_max <= setting
        change = found.blocks_max - before
        assert change in {"use": (0, 1), "in vain": (-1, 0)}.get(end, (0,))
    assert sum(found.outcomes.values()) == sum(end != "fail" for _, end in ends)
    for number in range(setting):
        found.begin(keys(number)[0])
        found.arrive(keys(number)[0])
        assert found.is_full == (number + 1 >= found.blocks_max)
    for number in range(setting):
        found.use(keys(number)[0])
    assert found.blocks_max == setting
    assert not found.is_small
