"""What prefetch orders bring into memory, and what they leave to requests."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tiering.conftest import JOB_TIMEOUT_S, LARGE_BUDGETS, Bench, MakeBench, keys
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.policies import BUILT_IN_POLICIES
from tiered_kv.cpu.recent_uses import KEPT_ROWS_MAX, RecentUses
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.order import ORDER_BLOCKS_MAX, PrefetchOrder
from tiered_kv.tiering.orders import JOB_BLOCKS, KEYS_A_TURN, TURNS_A_STEP
from tiered_kv.tiering.requests import ManagerLimits

FIRST_JOB = JOB_BLOCKS[0]
_names = itertools.count()


def limits(promotions: int = 16, orders: int = 8) -> ManagerLimits:
    return ManagerLimits(promotion_blocks_max=promotions, prefetch_blocks_max=orders)


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench(num_blocks=24, limits=limits())


def give(bench: Bench, *numbers: int, until_s: float = 30.0) -> PrefetchOrder:
    order = PrefetchOrder(f"{next(_names)}", keys(*numbers), bench.clock() + until_s)
    bench.manager.orders.give(order)
    return order


def brought(bench: Bench, *numbers: int, until_s: float = 30.0) -> PrefetchOrder:
    """Return an order whose blocks a tier has loaded."""
    bench.tier.has(*numbers)
    order = give(bench, *numbers, until_s=until_s)
    end_all(bench)
    return order


def end_all(bench: Bench) -> None:
    """Make steps until no tier has a job."""
    for _ in range(20):
        bench.step()
        while bench.tier.jobs:
            bench.tier.end()
    bench.step()


def outcome(bench: Bench, name: str) -> int:
    return bench.counter("prefetched_blocks_total", name, tier="cpu")


def counted(order: PrefetchOrder) -> dict[str, int]:
    return {name: count for name, count in order.counts().items() if count}


def test_an_order_brings_what_a_tier_has_and_names_the_rest(bench: Bench) -> None:
    bench.tier.has(1, 2, 4)
    order = give(bench, 1, 2, 3, 4)
    assert counted(order) == {"coming": 4}
    bench.step()
    assert bench.jobs == [keys(1, 2, 4)]
    assert counted(order) == {"coming": 3, "absent": 1}
    bench.end()
    bench.step()
    assert counted(order) == {"in_memory": 3, "absent": 1}
    assert bench.lookup(keys(1, 2, 4), bench.request("a")) == [True] * 3


def test_a_block_in_memory_is_held_and_not_loaded(bench: Bench) -> None:
    bench.store(keys(1), bench.request("a"))
    bench.tier.jobs.clear()
    order = give(bench, 1)
    bench.step()
    assert counted(order) == {"in_memory": 1}
    assert not bench.jobs
    assert bench.primary.blocks[keys(1)[0]].ref_cnt >= 1
    bench.manager.orders.drop(order.name)
    bench.step()
    assert outcome(bench, "unused") == 0, "it was not loaded for the order"


def test_a_block_takes_no_row_before_its_load_is_submitted(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=64, limits=limits(48, 40))
    bench.tier.has(*range(1, 31))
    before = bench.free
    order = give(bench, *range(1, 31))
    bench.step()
    assert before - bench.free == len(bench.jobs[0]) == FIRST_JOB, "one small job at a time"
    bench.step()
    assert before - bench.free == FIRST_JOB
    end_all(bench)
    assert counted(order) == {"in_memory": 30}


def test_jobs_grow_while_they_end_within_a_step_and_shrink_once_they_do_not(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=512, limits=limits(400, 300))
    bench.tier.has(*range(300))
    give(bench, *range(300))
    for _ in range(20):  # the blocks are looked up
        bench.step()
    sizes = []
    for steps in (0, 0, 0, 2, 2, 0):
        sizes.append(len(bench.jobs[0]))
        for _ in range(steps):
            bench.step()
        bench.end()
    assert sizes == [4, 4, 8, 16, 8, 4], "the first one waited while the blocks were looked up"


def test_a_lookup_that_a_tier_answers_late_takes_no_row(bench: Bench) -> None:
    bench.tier.has(1, 2, answer=None)
    order, before = give(bench, 1, 2), bench.free
    for _ in range(3):
        bench.step()
        assert bench.free == before
        assert counted(order) == {"coming": 2}
    bench.tier.has(1)
    end_all(bench)
    assert counted(order) == {"in_memory": 1, "absent": 1}


def test_no_order_loads_while_a_request_s_load_is_in_flight(bench: Bench) -> None:
    context = bench.promote(1, 2)
    assert bench.jobs == [keys(1, 2)]
    bench.tier.has(1, 2, 5, 6)
    give(bench, 5, 6)
    bench.step()
    bench.step()
    assert bench.jobs == [keys(1, 2)]
    bench.end()
    bench.step()
    assert bench.jobs == [keys(5, 6)]
    assert bench.lookup(keys(1, 2), context) == [True] * 2


def test_a_request_s_load_goes_beside_an_order_s(bench: Bench) -> None:
    bench.tier.has(1, 2, 5)
    give(bench, 1, 2)
    bench.step()
    assert bench.lookup(keys(5), bench.request("a")) == [None]
    bench.step()
    assert bench.jobs == [keys(1, 2), keys(5)]


def test_a_request_waits_for_a_block_that_an_order_loads(bench: Bench) -> None:
    bench.tier.has(1)
    order, context = give(bench, 1), bench.request("a")
    bench.step()
    assert bench.lookup(keys(1), context) == [None]
    bench.end()
    bench.step()
    assert bench.lookup(keys(1), context) == [True]
    bench.load(keys(1), context)
    assert counted(order) == {"used": 1}
    assert outcome(bench, "used") == 1
    assert bench.primary.blocks[keys(1)[0]].ref_cnt == 0


def test_a_used_block_is_held_no_more_and_counts_once(bench: Bench) -> None:
    first, second = brought(bench, 1, 2), brought(bench, 2, 3)
    assert counted(second) == {"in_memory": 2}
    context = bench.request("a")
    assert bench.lookup(keys(2), context) == [True]
    bench.load(keys(2), context)
    assert counted(first) == counted(second) == {"in_memory": 1, "used": 1}
    assert bench.primary.blocks[keys(2)[0]].ref_cnt == 0
    bench.clock.advance(31.0)
    bench.step()
    assert first.is_ended
    assert second.is_ended
    assert (outcome(bench, "used"), outcome(bench, "unused")) == (1, 2)


@pytest.mark.parametrize("how", ["dropped", "over", "reset"])
def test_an_order_that_ends_holds_nothing(bench: Bench, how: str) -> None:
    order = brought(bench, 1, 2, until_s=20.0)
    bench.clock.advance(19.0)
    bench.step()
    assert min(bench.primary.blocks[key].ref_cnt for key in keys(1, 2)) == 1, "held longer than for a request"
    if how == "dropped":
        bench.manager.orders.drop(order.name)
    elif how == "over":
        bench.clock.advance(1.5)
    else:
        bench.manager.reset_cache()
    bench.step()
    assert order.is_ended
    assert not bench.manager.orders.exist
    assert bench.counter("promotion_blocks", tier="cpu") == 0
    assert outcome(bench, "unused") == 2
    if how != "reset":
        assert max(bench.primary.blocks[key].ref_cnt for key in keys(1, 2)) == 0


def test_an_order_that_ends_while_it_loads_leaves_no_hold(bench: Bench) -> None:
    bench.tier.has(1, 2)
    order = give(bench, 1, 2)
    bench.step()
    bench.manager.orders.drop(order.name)
    bench.step()
    bench.end()
    bench.step()
    assert max(bench.primary.blocks[key].ref_cnt for key in keys(1, 2)) == 0
    assert outcome(bench, "unused") == 2


def test_a_block_that_cannot_be_loaded_is_absent(bench: Bench) -> None:
    bench.tier.has(1, 2)
    order = give(bench, 1, 2)
    bench.step()
    bench.end(success=False, only=keys(2), reason="corrupt")
    bench.step()
    assert counted(order) == {"in_memory": 1, "absent": 1}


def test_a_block_that_one_tier_cannot_load_comes_from_the_next(make_bench: MakeBench) -> None:
    bench = make_bench(LARGE_BUDGETS, LARGE_BUDGETS, num_blocks=24, limits=limits())
    for tier in bench.tiers:
        tier.has(1, 2)
    order = give(bench, 1, 2)
    bench.step()
    bench.tier.end(success=False, only=keys(2), reason="corrupt")
    bench.step()
    assert counted(order) == {"in_memory": 1, "coming": 1}
    bench.step()
    assert [list(job.keys) for job in bench.tiers[1].jobs] == [keys(1)]
    bench.tiers[1].end()
    bench.step()
    assert counted(order) == {"in_memory": 2}


def test_blocks_that_wait_for_a_tier_come_from_the_next_when_its_breaker_opens(make_bench: MakeBench) -> None:
    failing = {"breaker_failures": 1, "load_budget": 64}
    bench = make_bench(failing, LARGE_BUDGETS, num_blocks=24, limits=limits())
    for tier in bench.tiers:
        tier.has(1, 2, 3)
    order = give(bench, 1, 2, 3)
    bench.step()
    bench.end(success=False)  # the only block that its budget lets it load
    for _ in range(6):
        bench.step()
        while bench.tiers[1].jobs:
            bench.tiers[1].end()
    assert counted(order) == {"in_memory": 3}
    assert not bench.tier.jobs


def test_a_tier_that_admits_no_load_now_keeps_none_of_another_tier_waiting(make_bench: MakeBench) -> None:
    bench = make_bench({**LARGE_BUDGETS, "breaker_failures": 1}, LARGE_BUDGETS, num_blocks=24, limits=limits())
    bench.tier.has(1)
    bench.tiers[1].has(2)
    bench.store(keys(9), bench.request("a"))
    bench.tier.end(success=False)
    bench.tiers[1].end()
    bench.step()  # the first tier's breaker opens
    bench.clock.advance(60.0)
    bench.step()
    bench.store(keys(8), bench.request("b"))  # the probe
    assert bench.tier.jobs
    order = give(bench, 1, 2)
    bench.step()
    assert [list(job.keys) for job in bench.tiers[1].jobs if job.is_promotion] == [keys(2)]
    assert counted(order) == {"coming": 2}


def test_a_tier_that_never_answers_a_load_keeps_no_order_for_ever(bench: Bench) -> None:
    bench.tier.has(1)
    order = give(bench, 1, until_s=60.0)
    bench.step()
    bench.clock.advance(31.0)  # the job has expired
    bench.step()
    bench.step()
    assert counted(order) == {"absent": 1}


def test_a_load_that_never_ends_stops_the_loads_of_orders_until_its_deadline_only(bench: Bench) -> None:
    bench.tier.has(1, 2)
    give(bench, 1, until_s=60.0)
    bench.step()
    order = give(bench, 2, until_s=60.0)
    bench.step()
    assert bench.jobs == [keys(1)]
    bench.clock.advance(JOB_TIMEOUT_S + 1.0)
    bench.step()
    bench.step()
    assert bench.jobs == [keys(1), keys(2)]
    bench.tier.results.append(JobResult(bench.tier.jobs.pop().job_id, True))
    bench.step()
    assert counted(order) == {"in_memory": 1}


def test_orders_hold_their_part_of_the_budget_only(bench: Bench) -> None:
    order = brought(bench, *range(1, 13))
    assert counted(order) == {"in_memory": 8, "coming": 4}
    context = bench.request("a")
    assert bench.lookup(keys(1, 2), context) == [True] * 2
    bench.load(keys(1, 2), context)
    end_all(bench)
    assert counted(order) == {"used": 2, "in_memory": 8, "coming": 2}


def test_a_request_that_lacks_promotion_budget_gets_that_of_orders(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=24, limits=limits(promotions=8, orders=8))
    order = brought(bench, *range(1, 9))
    bench.tier.has(*range(11, 19))
    assert bench.lookup(keys(*range(11, 19)), bench.request("a")) == [None] * 8
    assert counted(order) == {"refused": 8}
    bench.step()
    assert bench.jobs == [keys(*range(11, 19))]
    assert outcome(bench, "unused") == 8


def test_a_request_that_lacks_rows_gets_those_that_orders_hold(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=8, limits=limits(promotions=8, orders=8))
    order = brought(bench, *range(1, 9))
    assert bench.free == 0
    assert bench.has_room_for(21, 22, 23)
    assert counted(order) == {"in_memory": 5, "refused": 3}
    assert bench.has_room_for(31, 32, 33, 34, 35)
    assert counted(order) == {"refused": 8}


def test_an_order_evicts_what_was_used_before_it_and_nothing_used_since(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=8, limits=limits(promotions=8, orders=8))
    bench.store(keys(*range(11, 19)), bench.request("old"))
    while bench.tier.jobs:
        bench.tier.end()
    bench.step()
    bench.tier.has(*range(1, 9))
    order = give(bench, *range(1, 9))
    bench.tier.present = dict.fromkeys(keys(*range(1, 9)))  # not answered yet
    bench.step()
    since = bench.request("since")
    assert bench.lookup(keys(11, 12, 13), since) == [True] * 3
    bench.load(keys(11, 12, 13), since)
    bench.step()
    bench.step()
    bench.tier.has(*range(1, 9))
    end_all(bench)
    assert counted(order) == {"in_memory": 5, "refused": 3}
    assert bench.lookup(keys(11, 12, 13), since) == [True] * 3
    assert outcome(bench, "refused") == 3


@pytest.mark.parametrize("eviction", BUILT_IN_POLICIES)
def test_what_no_request_has_used_goes_before_what_a_request_has(make_bench: MakeBench, eviction: str) -> None:
    bench = make_bench(num_blocks=8, limits=limits(promotions=8, orders=3), eviction=eviction)
    bench.store(keys(*range(11, 17)), bench.request("old"))
    end_all(bench)
    for first in range(20, 80, 3):  # useless orders, one after another
        bench.manager.orders.drop(brought(bench, *range(first, first + 3)).name)
        bench.step()
    assert outcome(bench, "unused") == 60
    kept = bench.lookup(keys(*range(11, 17)), bench.request("a"))
    assert kept.count(True) >= 5, "two rows were free, and orders hold three"
    order = brought(bench, 1)
    used = bench.request("b")
    assert bench.lookup(keys(1), used) == [True]
    bench.load(keys(1), used)
    bench.manager.orders.drop(order.name)
    bench.step()
    bench.store(keys(2, 3), bench.request("c"))
    assert bench.lookup(keys(1), bench.request("d")) == [True]


@pytest.mark.parametrize("eviction", BUILT_IN_POLICIES)
def test_an_order_for_blocks_that_were_evicted_is_no_use_of_them(make_bench: MakeBench, eviction: str) -> None:
    """`arc` counts a block as used again if a request brings it back soon. An order is no request."""
    bench = make_bench(num_blocks=16, limits=limits(promotions=8, orders=3), eviction=eviction)
    bench.store(keys(*range(1, 9)), bench.request("first"))
    again = bench.request("again")
    assert bench.lookup(keys(*range(1, 9)), again) == [True] * 8
    bench.load(keys(*range(1, 9)), again)
    for first in range(11, 23, 4):  # `arc` evicts blocks of the first of these requests, and remembers their keys
        end_all(bench)
        bench.store(keys(*range(first, first + 4)), bench.request(f"from {first}"))
    end_all(bench)
    unused = [number for number in range(1, 23) if number not in (9, 10) and keys(number)[0] not in bench.primary.index]
    bench.manager.orders.drop(brought(bench, *unused[1:4]).name)
    bench.step()
    assert outcome(bench, "unused") == 3
    bench.store(keys(31, 32, 33), bench.request("new"))
    assert not any(key in bench.primary.index for key in keys(*unused[1:4]))


def test_a_long_order_costs_each_step_little(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=24, limits=limits())
    bench.tier.present = {}
    order = give(bench, *range(ORDER_BLOCKS_MAX))
    for number in range(1, 5):
        bench.step()
        assert len(bench.tier.asked) == number * KEYS_A_TURN * TURNS_A_STEP
    bench.manager.orders.drop(order.name)
    bench.step()
    assert len(bench.tier.asked) == 4 * KEYS_A_TURN * TURNS_A_STEP


def test_a_long_order_does_not_keep_a_short_one_waiting(bench: Bench) -> None:
    bench.tier.present = {}
    give(bench, *range(ORDER_BLOCKS_MAX))
    order = give(bench, -1)
    bench.step()
    assert counted(order) == {"absent": 1}


def test_a_load_that_never_ends_and_ended_orders_leave_nothing_waiting(bench: Bench) -> None:
    bench.tier.has(*range(100))
    give(bench, 1)
    bench.step()
    assert bench.jobs == [keys(1)]
    for _ in range(50):
        order = give(bench, *range(2, 40))
        bench.step()
        bench.manager.orders.drop(order.name)
        bench.step()
    orders = bench.manager.orders
    assert not any(orders._found.values())
    assert not orders._asking
    assert len(orders._orders) == 1
    assert not orders.has_work or orders._loading


def test_without_orders_nothing_is_noted(bench: Bench) -> None:
    order = brought(bench, 1)
    assert bench.primary.recent is not None
    bench.manager.orders.drop(order.name)
    bench.step()
    assert bench.primary.recent is None
    assert not bench.manager.orders.exist
    assert "\0prefetch" not in "".join(bench.manager._requests.states)


def test_a_tier_that_raises_costs_the_order_only(bench: Bench) -> None:
    bench.tier.has(1)
    bench.tier.raises = "lookup"
    order = give(bench, 1)
    bench.step()
    assert counted(order) == {"absent": 1}
    bench.tier.raises = ""
    assert bench.lookup(keys(1), bench.request("a")) == [None]


def test_recent_uses_say_when_they_do_not_know() -> None:
    uses = RecentUses()
    uses.note([1, 2])
    before = uses.number
    uses.note([3])
    uses.note([4, 5])
    assert sorted(uses.since(before) or []) == [3, 4, 5]
    assert uses.since(uses.number) == []
    uses.note(range(KEPT_ROWS_MAX))
    assert uses.since(before) is None
    assert uses.since(uses.number - KEPT_ROWS_MAX) is not None


NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)


class OrdersMachine(RuleBasedStateMachine):
    """Orders and requests over one tier, whose jobs end in any order of steps."""

    @initialize(blocks=st.sampled_from([4, 6, 12, 24]), orders=st.integers(1, 8), promotions=st.integers(1, 12))
    def open(self, blocks: int, orders: int, promotions: int) -> None:
        self.bench = Bench(LARGE_BUDGETS, num_blocks=blocks, limits=limits(promotions, orders))
        self.orders_max = min(orders, promotions)
        self.given: list[PrefetchOrder] = []
        self.requests = itertools.count()

    @rule(numbers=NUMBERS, until_s=st.sampled_from([1.0, 5.0, 60.0]))
    def order(self, numbers: list[int], until_s: float) -> None:
        self.given.append(give(self.bench, *numbers, until_s=until_s))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.bench.manager.orders.drop(data.draw(st.sampled_from(self.given)).name)

    @rule(numbers=NUMBERS, answer=st.sampled_from([True, None]))
    def tier_has(self, numbers: list[int], answer: bool | None) -> None:
        self.bench.tier.has(*numbers, answer=answer)

    @rule()
    def step(self) -> None:
        self.bench.step()

    @precondition(lambda self: self.bench.tier.jobs)
    @rule(success=st.booleans())
    def end(self, success: bool) -> None:
        self.bench.end(success)

    @rule(numbers=NUMBERS)
    def request(self, numbers: list[int]) -> None:
        context = self.bench.request(f"request-{next(self.requests)}")
        wanted = keys(*numbers)
        found = [key for key, answer in zip(wanted, self.bench.lookup(wanted, context), strict=True) if answer]
        if found:
            self.bench.load(found, context)
        absent = [key for key in wanted if key not in self.bench.primary]
        output = self.bench.manager.prepare_store(absent, context)
        if output is not None:
            self.bench.manager.complete_store(output.keys_to_store, context)
        self.bench.manager.on_request_finished(context)

    @rule()
    def reset(self) -> None:
        self.bench.manager.reset_cache()

    @rule(seconds=st.sampled_from([0.5, 2.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    @invariant()
    def counts_add_up(self) -> None:
        for order in getattr(self, "given", ()):
            counts = order.counts()
            assert min(counts.values()) >= 0
            assert sum(counts.values()) == len(order.keys)

    @invariant()
    def holds_are_bounded_and_of_blocks_in_memory(self) -> None:
        if not hasattr(self, "bench"):
            return
        orders, primary = self.bench.manager.orders, self.bench.primary
        assert len(orders._held) <= self.orders_max
        assert orders.budget._loaded <= orders._held.keys(), "what nobody holds takes nothing of the budget"
        assert orders.budget._begun <= set().union(*(order.loading for order in orders._orders))
        for key in orders._held:
            row = primary.row_of(key)
            assert row is not None, "a held block is in memory"
            assert primary.ref_cnt[row] > 0

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for order in self.given:
            self.bench.manager.orders.drop(order.name)
        for _ in range(40):
            self.bench.step()
            while self.bench.tier.jobs:
                self.bench.tier.end()
        self.bench.step()
        primary = self.bench.primary
        assert not self.bench.manager.orders.exist
        self.bench.clock.advance(100.0)
        end_all(self.bench)  # also the store of a block whose store has failed
        assert [row for row in primary.index.values() if row < 0 or primary.ref_cnt[row]] == [], "nothing is held"
        self.bench.manager.shutdown(timeout_s=0)


TestOrders = OrdersMachine.TestCase
TestOrders.settings = hypothesis_settings(stateful_step_count=30)


@pytest.mark.parametrize("ask", [0, 3, 12])
def test_demand_is_served_as_without_orders(make_bench: MakeBench, ask: int) -> None:
    """Whatever is ordered, the next load that a tier gets after one of a request is a request's, if one waits."""

    def jobs(with_orders: bool) -> list[list[OffloadKey]]:
        bench = make_bench(num_blocks=24, limits=limits())
        bench.tier.has(*range(40))
        if with_orders:
            give(bench, *range(20, 20 + ask)) if ask else None
        contexts: list[ReqContext] = []
        for number in range(4):
            contexts.append(bench.request(f"r{number}"))
            assert bench.lookup(keys(3 * number, 3 * number + 1, 3 * number + 2), contexts[-1]) == [None] * 3
            bench.step()
        found = [job for job in bench.jobs if job[0] in keys(*range(12))]
        assert all(len(job) <= FIRST_JOB for job in bench.jobs)
        assert len(bench.jobs) - len(found) <= 1, "one small job of orders at most"
        return found

    assert jobs(True) == jobs(False)
