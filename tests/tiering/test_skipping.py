"""A request may skip the store, or the load, of its blocks: no tier gets them, or is asked for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.obedient import BLOCK_BYTES, WAIT_S, misses, put, stack_of
from tests.support.stacks import block_hashes
from tests.tiering.conftest import Bench, MakeBench, keys
from tiered_kv.base import OffloadPolicy, ReqContext
from tiered_kv.hints import HINTS_KEY
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.rig import make_keys


def hinted(bench: Bench, req_id: str, **hints: object) -> ReqContext:
    context = ReqContext(req_id, {HINTS_KEY: hints})
    bench.manager.on_new_request(context)
    return context


def test_skipped_stores_reach_no_tier(bench: Bench) -> None:
    bench.store(keys(0), bench.request("before"))
    context = hinted(bench, "a", skip="store")
    output = bench.manager.prepare_store(keys(0, 1, 2), context)
    assert output is not None, "None would say that there is no room"
    assert output.keys_to_store == output.evicted_keys == []
    bench.manager.complete_store([], context)
    bench.manager.on_request_finished(context)
    bench.step()
    assert bench.jobs == [keys(0)]
    assert bench.lookup(keys(0, 1, 2), bench.request("b")) == [True, False, False]
    assert bench.counter("skipped_blocks_total", "by_request", tier="cpu") == 2
    assert bench.counter("hinted_requests_total", tier="cpu") == 1


def test_a_request_that_skips_the_store_loads_without_offering_blocks(make_bench: MakeBench) -> None:
    bench = make_bench({"admit_after": 2})
    bench.store(keys(0), bench.request("before"))
    context = hinted(bench, "a", skip="store")
    assert bench.lookup(keys(0), context) == [True]
    bench.load(keys(0), context)
    assert not bench.jobs
    bench.load(keys(0), bench.request("b"))
    assert bench.jobs == [keys(0)]


def test_promotions_of_a_request_that_skips_the_store_fill_no_tier_above(make_bench: MakeBench) -> None:
    bench = make_bench({"fill_on_promotion": True}, {})
    for number, skip in enumerate((["store"], [])):
        bench.tiers[1].has(number)
        bench.lookup(keys(number), hinted(bench, f"request {number}", skip=skip))
        bench.step()
        bench.end()
        bench.step()
    assert [job.keys for job in bench.tiers[0].jobs] == [keys(1)]


def test_a_request_level_tier_gets_nothing_of_a_request_that_skips_the_store(make_bench: MakeBench) -> None:
    bench = make_bench(policy=OffloadPolicy.REQUEST_LEVEL)
    bench.store(keys(0), bench.request("before"))
    context = hinted(bench, "a", skip="store")
    bench.manager.prepare_store(keys(0, 1), context)
    bench.manager.on_request_finished(context)
    assert not bench.jobs


def test_a_request_that_skips_the_load_finds_nothing_and_promotes_nothing(bench: Bench) -> None:
    bench.store(keys(0, 1), bench.request("before"))
    bench.end()
    bench.tier.has(0, 1, 2)
    context = hinted(bench, "a", skip="load")
    other = bench.request("b")
    assert bench.lookup(keys(0, 1, 2), context) == bench.manager.lookup_many(keys(0, 1, 2), context) == [False] * 3
    bench.manager.prefetch(keys(2), context)
    bench.step()
    assert not bench.jobs
    assert bench.lookup(keys(0, 1, 2), other) == [True, True, None], "other requests find them meanwhile"
    bench.manager.on_request_finished(context)
    again = bench.request("a")
    assert bench.lookup(keys(0), again) == [True], "the hint was that of the request, not of its id"
    bench.step()
    assert bench.calls_of_a_hit(keys(0)[0]) == 1, "without such a request a lookup costs what it did"


def test_the_primary_tier_alone_keeps_the_hints_too(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.store(keys(0), bench.request("before"))
    context = ReqContext("a", {HINTS_KEY: {"skip": ["load", "store"]}})
    bench.manager.on_new_request(context)
    assert bench.manager.lookup(keys(0)[0], context) is False
    output = bench.manager.prepare_store(keys(1), context)
    assert output is not None
    assert output.keys_to_store == []
    bench.manager.on_request_finished(context)
    assert bench.manager.lookup(keys(0)[0], context)


def test_bad_hints_change_nothing_and_are_counted(bench: Bench) -> None:
    context = hinted(bench, "a", skip="everything")
    bench.store(keys(0), context)
    assert bench.jobs == [keys(0)]
    assert bench.counter("refused_hints_total", tier="cpu") == 1
    assert bench.counter("hinted_requests_total", tier="cpu") == 0


# Through the facade, and in the history.


@pytest.fixture
def stack() -> Iterator[Stack]:
    with open_stack(stack_of({"type": "memory", "capacity": "1MiB"})) as stack:
        yield stack


def test_put_and_get_take_hints(stack: Stack) -> None:
    keys, blocks = make_keys(4), np.zeros((4, BLOCK_BYTES), np.uint8)
    wanted = block_hashes(keys)
    assert stack.put(wanted, blocks, hints={"skip": "store"}) == 0
    assert stack.get(wanted, blocks, WAIT_S) == 0
    put(stack, keys)
    assert stack.get(wanted, blocks, WAIT_S, hints={"skip": "load"}) == 0
    assert stack.get(wanted, blocks, WAIT_S, hints={"priority": 1, "ttl": 60}) == 4
    assert stack.get(wanted, blocks, WAIT_S, hints={"priority": 7}) == 4
    assert stack.counters()["cpu"]["refused_hints_total"] == 1


def test_a_skipped_load_is_a_miss_by_request_in_every_tier(stack: Stack) -> None:
    keys = make_keys(4)
    wanted = block_hashes(keys)
    put(stack, keys)
    stack.get(wanted, hints={"skip": "load"})
    assert misses(stack, "cpu") == misses(stack, "memory") == {"by_request": 4}
    assert [tier.fate for tier in stack.explain(wanted[:1])[0].tiers] == ["present", "stored"]
