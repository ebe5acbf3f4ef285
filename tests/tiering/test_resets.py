"""A reset and the requests that run: a request belongs to the epoch in which it began."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tiering.conftest import LARGE_BUDGETS, Bench, MakeBench, keys
from tiered_kv.base import OffloadPolicy, ReqContext
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.counters import count_of
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.tiering.audit.audit import AuditRules
from tiered_kv.tiering.audit.manager import AuditedManager
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.requests import ManagerLimits


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench(LARGE_BUDGETS)


def announce(bench: Bench, context: ReqContext) -> None:
    bench.manager.on_new_request(context)


def look_up(bench: Bench, context: ReqContext) -> None:
    bench.lookup(keys(9), context)


def store(bench: Bench, context: ReqContext) -> None:
    bench.store(keys(8), context)


FIRST_CALLS = [announce, look_up, store]
"""A request begins with its first call, whichever that is."""


@pytest.mark.parametrize("begin", FIRST_CALLS)
def test_a_request_that_began_before_a_reset_stores_nothing(
    bench: Bench, begin: Callable[[Bench, ReqContext], None]
) -> None:
    running = ReqContext("running")
    begin(bench, running)
    bench.manager.reset_cache()
    output = bench.manager.prepare_store(keys(1, 2), running)
    assert output is not None
    assert output.keys_to_store == output.evicted_keys == []
    bench.manager.complete_store(keys(1, 2), running)
    assert bench.lookup(keys(1, 2), bench.request("later")) == [False, False]


@pytest.mark.parametrize("begin", FIRST_CALLS)
def test_a_request_that_began_before_a_reset_loads_nothing(
    bench: Bench, begin: Callable[[Bench, ReqContext], None]
) -> None:
    running, later = ReqContext("running"), ReqContext("later")
    begin(bench, running)
    bench.manager.reset_cache()
    bench.tier.jobs.clear()
    bench.store(keys(1), bench.request("later"))
    bench.tier.has(2)
    assert bench.lookup(keys(1, 2), running) == bench.manager.lookup_many(keys(1, 2), running) == [False, False]
    bench.manager.prefetch(keys(1, 2), running)
    bench.step()
    assert not any(job.is_promotion for job in bench.tier.jobs)
    with pytest.raises(ValueError, match="before a reset"):
        bench.manager.prepare_load(keys(1), running)
    assert bench.manager.prepare_load([], running).block_ids.size == 0
    assert bench.lookup(keys(1, 2), later) == [True, None]


def test_blocks_that_were_found_before_a_reset_are_not_loaded_after_it(bench: Bench) -> None:
    running = bench.request("running")
    bench.store(keys(1), running)
    assert bench.lookup(keys(1), running) == [True]
    bench.manager.reset_cache()  # in the same step
    bench.store(keys(1), bench.request("later"))
    with pytest.raises(ValueError, match="before a reset"):
        bench.manager.prepare_load(keys(1), running)


def test_an_id_can_be_used_again(bench: Bench) -> None:
    for number, is_ended in enumerate((True, False)):
        running = bench.request("running")
        bench.manager.reset_cache()
        if is_ended:
            bench.manager.on_request_finished(running)
        again = bench.request("running")
        bench.store(keys(number), again)
        assert bench.lookup(keys(number), again) == [True]
        bench.step()
        assert bench.calls_of_a_hit(keys(number)[0]) == 1


def test_lookups_cost_a_check_only_while_requests_from_before_a_reset_run(bench: Bench) -> None:
    running, storing = bench.request("running"), ReqContext("storing")
    bench.manager.prepare_store(keys(1), storing)
    bench.manager.reset_cache()
    bench.store(keys(2), bench.request("later"))
    assert bench.calls_of_a_hit(keys(2)[0]) > 1
    for each in (running, storing):
        bench.manager.on_request_finished(each)
    bench.step()
    assert bench.calls_of_a_hit(keys(2)[0]) == 1
    assert not any(bench.manager.loads_nothing(request) for request in (running, storing))
    assert not any(bench.manager.is_outdated(request) for request in (running, storing))


def test_a_request_that_is_forgotten_stays_outdated(make_bench: MakeBench) -> None:
    bench = make_bench(LARGE_BUDGETS, limits=ManagerLimits(requests_max=2))
    running = bench.request("running")
    bench.manager.reset_cache()
    for name in "abc":
        bench.request(name)
    assert bench.lookup(keys(1), running) == [False]
    store(bench, running)
    assert bench.lookup(keys(8), bench.request("later")) == [False]


def test_a_tier_of_whole_requests_gets_nothing_of_a_request_from_before_a_reset(make_bench: MakeBench) -> None:
    bench = make_bench(LARGE_BUDGETS, policy=OffloadPolicy.REQUEST_LEVEL)
    running, later = bench.request("running"), bench.request("later")
    bench.manager.reset_cache()
    bench.manager.on_request_finished(later)
    later = bench.request("later")
    bench.store(keys(1), later)
    bench.manager.prepare_store(keys(1), running)
    bench.manager.on_request_finished(running)
    assert bench.jobs == []
    bench.manager.on_request_finished(later)
    assert bench.jobs == [keys(1)]


def test_the_audit_compares_no_block_of_a_request_from_before_a_reset() -> None:
    """With the facade a block is found by one request, and stored by another."""
    region = PrimaryRegion(16, 64)
    rules = AuditRules(share=1.0, tolerance=0.0, stops=True)
    manager = AuditedManager(rules, PrimaryRows(CPUBackend(region)))
    running, asking = ReqContext("put-0"), ReqContext("get-1")
    manager.on_new_request(running)
    manager.reset_cache()
    storing = ReqContext("put-2")
    manager.on_new_request(storing)
    output = manager.prepare_store(keys(1), storing)
    assert output is not None
    manager.complete_store(output.keys_to_store, storing)
    manager.on_request_finished(storing)
    manager.on_new_request(asking)
    assert manager.lookup(keys(1)[0], asking) is False, "it is audited"
    manager.on_request_finished(asking)
    output = manager.prepare_store(keys(1), running)
    assert output is not None
    assert output.keys_to_store == []
    manager.shutdown()


def test_requests_without_an_id_go_on(bench: Bench) -> None:
    store(bench, ReqContext())
    bench.manager.reset_cache()
    assert bench.lookup(keys(8, 2), ReqContext()) == [False, False]
    bench.store(keys(2), ReqContext())
    assert bench.lookup(keys(2), ReqContext()) == [True]


def test_the_history_tells_why_an_old_request_found_nothing() -> None:
    region, history = PrimaryRegion(8, 64), BlockHistory(1 << 10, ["cpu"], [None], blocks=[8])
    manager = TieringOffloadingManager(PrimaryRows(CPUBackend(region)), history=history)
    running = ReqContext("running")
    manager.on_new_request(running)
    manager.reset_cache()
    manager.lookup_many(keys(1, 2), running)
    manager.on_request_finished(running)
    assert count_of(manager.counters()["cpu"], "misses_total", "reset") == 2
    manager.shutdown()


def test_a_primary_tier_alone_keeps_old_requests_out() -> None:
    region = PrimaryRegion(8, 64)
    manager = TieringOffloadingManager(PrimaryRows(CPUBackend(region)))
    running, later = ReqContext("running"), ReqContext("later")
    manager.on_new_request(running)
    manager.reset_cache()
    for request, expected in ((running, []), (later, keys(1))):
        output = manager.prepare_store(keys(1), request)
        assert output is not None
        assert output.keys_to_store == expected
        manager.complete_store(keys(1), request)
    assert (manager.lookup(keys(1)[0], running), manager.lookup(keys(1)[0], later)) == (False, True)
    with pytest.raises(ValueError, match="before a reset"):
        manager.prepare_load(keys(1), running)
    manager.on_request_finished(running)
    manager.on_new_request(running)
    assert manager.lookup(keys(1)[0], running) is True
    manager.shutdown()
