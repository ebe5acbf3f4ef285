"""A tier is told of each request's end once, after the last job of the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.support.faulty import FourMethodTier, Gate
from tests.tiering import conftest
from tests.tiering.conftest import BLOCK_BYTES, keys
from tiered_kv.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.base import JobMetadata, JobResult
from tiered_kv.tiering.isolation import IsolatedTier
from tiered_kv.tiering.requests import ManagerLimits


class NotingTier(FourMethodTier):
    """Notes the calls about requests, by request, and checks that no job follows a request's end."""

    is_nonblocking = True
    policy = OffloadPolicy.BLOCK_LEVEL
    reports_stored = False
    holds = False

    def __init__(self, view: memoryview, name: str) -> None:
        super().__init__(None, view, name)
        self.calls: list[tuple[str, str]] = []
        self.stored: list[OffloadKey] = []

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.calls.append(("store", job_metadata.req_context.req_id))
        self.stored += job_metadata.keys
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.calls.append(("load", job_metadata.req_context.req_id))
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        return () if self.holds else super().get_finished()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append(("begin", req_context.req_id))
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append(("end", req_context.req_id))

    def reset_cache(self) -> bool:
        self.blocks.clear()
        return True

    def shutdown(self) -> None:
        self.calls.append(("shutdown", ""))

    def of(self, req_id: str) -> list[str]:
        """Return the calls about a request."""
        return [call for call, of in self.calls if of == req_id]


class Bench(conftest.Bench):
    """A manager over noting tiers."""

    tiers: list[NotingTier]  # type: ignore[assignment]

    def __init__(self, *tiers: dict[str, object], policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL) -> None:
        super().__init__(*tiers, num_blocks=32, limits=ManagerLimits(), policy=policy, of_type=NotingTier)

    def begin_store(self, wanted: list[OffloadKey], context: ReqContext) -> Callable[[], None]:
        """Begin a store, and return what ends it."""
        output = self.manager.prepare_store(wanted, context)
        assert output is not None
        return lambda: self.manager.complete_store(output.keys_to_store, context)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench({})
    yield bench
    bench.manager.shutdown()


def test_a_request_that_was_never_announced_ends_after_its_store_too(bench: Bench) -> None:
    (tier,) = bench.tiers
    context = ReqContext("a")
    end = bench.begin_store(keys(0), context)
    bench.manager.on_request_finished(context)
    end()
    assert tier.of("a") == ["store", "end"]


def test_an_id_that_is_used_again_ends_after_the_stores_of_both(bench: Bench) -> None:
    (tier,) = bench.tiers
    first = bench.request("a")
    old = bench.begin_store(keys(0), first)
    bench.manager.on_request_finished(first)
    second = bench.request("a")
    new = bench.begin_store(keys(1), second)
    bench.manager.on_request_finished(second)
    old()
    assert tier.of("a") == ["begin", "end", "begin", "store"]
    new()
    assert tier.of("a") == ["begin", "end", "begin", "store", "store", "end"]


def test_the_shutdown_ends_all_requests_before_it_closes_the_tiers() -> None:
    bench = Bench({}, {})
    stored, running = bench.request("stored"), bench.request("running")
    bench.begin_store(keys(0), stored)
    bench.manager.on_request_finished(stored)
    bench.store(keys(1), running)
    bench.manager.shutdown()
    for tier in bench.tiers:
        assert tier.of("stored") == ["begin", "end"]
        assert tier.of("running") == ["begin", "store", "end"]
        assert tier.calls[-1] == ("shutdown", "")


def test_a_promotion_that_is_not_submitted_ends_with_its_request_or_is_another_one_s(bench: Bench) -> None:
    (tier,) = bench.tiers
    tier.blocks = dict.fromkeys(keys(0, 1), bytes(BLOCK_BYTES))
    aborted, other = bench.request("aborted"), bench.request("other")
    assert bench.manager.lookup_many(keys(0, 1), aborted) == [None, None]
    assert bench.manager.lookup(keys(0)[0], other) is None
    bench.manager.on_request_finished(aborted)
    bench.manager.on_schedule_end()
    assert tier.of("aborted") == ["begin", "end"]
    assert tier.of("other") == ["begin", "load"]
    assert bench.manager.lookup(keys(0)[0], other) is True
    assert bench.manager.counters()["tier0"]["load_budget_used_bytes"] == 0
    assert bench.manager.counters()["cpu"]["used_blocks"] == 1


def test_a_promotion_that_ends_later_fills_the_tier_above_for_no_request() -> None:
    bench = Bench({"fill_on_promotion": True}, {})
    above, below = bench.tiers
    below.blocks = dict.fromkeys(keys(0), bytes(BLOCK_BYTES))
    below.holds = True
    context = bench.request("a")
    assert bench.manager.lookup(keys(0)[0], context) is None
    bench.manager.on_schedule_end()
    bench.manager.on_request_finished(context)
    below.holds = False
    bench.manager.on_schedule_end()
    assert below.of("a") == ["begin", "load", "end"]
    assert above.of("a") == ["begin", "end"]
    assert above.stored == keys(0)
    bench.manager.shutdown()


# Tiers that want whole requests.


@pytest.fixture
def whole() -> Iterator[Bench]:
    bench = Bench({}, policy=OffloadPolicy.REQUEST_LEVEL)
    yield bench
    bench.manager.shutdown()


@pytest.mark.parametrize("other_ends", ["store", "failure", "never"])
def test_a_whole_request_has_the_blocks_that_another_one_is_storing(whole: Bench, other_ends: str) -> None:
    (tier,) = whole.tiers
    other, context = whole.request("other"), whole.request("a")
    end_other = whole.begin_store(keys(0), other)
    end = whole.begin_store(keys(0, 1), context)
    end()
    whole.manager.on_request_finished(context)
    whole.manager.on_schedule_end()
    assert tier.of("a") == ["begin"]
    if other_ends == "store":
        end_other()
    elif other_ends == "failure":
        whole.manager.complete_store(keys(0), other, success=False)
    else:
        whole.clock.advance(whole.manager.limits.wait_max_s)
    whole.manager.on_schedule_end()
    assert tier.of("a") == ["begin", "store", "end"]
    assert tier.stored == (keys(0, 1) if other_ends == "store" else keys(1))


def test_a_whole_request_has_blocks_that_were_promoted_loaded_and_touched(whole: Bench) -> None:
    (tier,) = whole.tiers
    whole.store(keys(0, 1), whole.request("earlier"))
    context = whole.request("a")
    whole.manager.touch(keys(0), context)
    whole.manager.prepare_load(keys(1), context)
    whole.manager.complete_load(keys(1), context)
    whole.store(keys(2), context)
    whole.manager.on_request_finished(context)
    assert tier.of("a") == ["begin", "store", "end"]
    assert tier.stored == keys(0, 1, 2)


def test_a_whole_request_has_the_blocks_of_a_store_without_room(whole: Bench) -> None:
    (tier,) = whole.tiers
    whole.store(keys(0), whole.request("earlier"))
    context = whole.request("a")
    assert whole.manager.prepare_store(keys(*range(40)), context) is None
    whole.manager.on_request_finished(context)
    assert tier.stored == keys(0)


# Any order of calls.

ACTIONS = ("begin", "store", "end_store", "fail_store", "look_up", "load", "finish", "step", "reset", "late")


@hypothesis.given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(0, 5)), max_size=40),
    policy=st.sampled_from(list(OffloadPolicy)),
)
@hypothesis.settings(max_examples=2 * hypothesis.settings().max_examples)
def test_no_job_of_a_request_follows_its_end_and_each_ends_once(
    actions: list[tuple[str, int, int]], policy: OffloadPolicy
) -> None:
    bench = Bench({"fill_on_promotion": True, "admit_after": 2}, {}, policy=policy)
    manager, running = bench.manager, dict[str, ReqContext]()
    stores: list[tuple[list[OffloadKey], ReqContext]] = []
    names = Counter[str]()
    for action, who, number in actions:
        context = running.get(str(who))
        if action == "step":
            manager.on_schedule_end()
        elif action == "reset":
            manager.reset_cache()
        elif action == "late":
            bench.clock.advance(manager.limits.wait_max_s / 2)
        elif action in ("end_store", "fail_store") and stores:
            done, storer = stores.pop(number % len(stores))
            manager.complete_store(done, storer, action == "end_store")
        elif action == "begin" and context is None:
            names[str(who)] += 1
            running[str(who)] = bench.request(f"{who}.{names[str(who)]}")
        elif context is None:
            continue
        elif action == "store":
            output = manager.prepare_store(keys(number, number + 1), context)
            if output is not None:
                stores.append((output.keys_to_store, context))
        elif action == "look_up":
            manager.lookup_many(keys(number, number + 1), context)
        elif action == "load" and manager.lookup(keys(number)[0], context):
            manager.prepare_load(keys(number), context)
            manager.complete_load(keys(number), context)
        elif action == "finish":
            manager.on_request_finished(running.pop(str(who)))
    for _ in range(3):
        bench.clock.advance(manager.limits.wait_max_s)
        manager.on_schedule_end()
    finished = {f"{who}.{each}" for who, last in names.items() for each in range(1, last + 1)}
    finished -= {context.req_id for context in running.values()}
    for tier in bench.tiers:
        assert all(tier.of(req_id)[-1] == "end" for req_id in finished)
    manager.shutdown()
    for tier in bench.tiers:
        for req_id in {of for _, of in tier.calls if of}:
            calls = tier.of(req_id)
            assert calls[0] == "begin"
            assert calls.index("end") == len(calls) - 1, calls


# A tier on a thread of its own.


def test_an_isolated_tier_gets_a_request_s_calls_in_order() -> None:
    region, gate = PrimaryRegion(8, BLOCK_BYTES), Gate(is_open=False)

    class SlowTier(NotingTier):
        is_nonblocking = False

        def submit_store(self, job_metadata: JobMetadata) -> None:
            gate.pass_through()
            super().submit_store(job_metadata)

    slow = SlowTier(region.kv_view, "slow")
    tier = IsolatedTier(slow)
    try:
        for number in range(3):
            context = ReqContext(f"{number}")
            tier.on_new_request(context)
            for block in range(2):
                job = JobMetadata(2 * number + block, keys(block), np.array([block]), False, context)
                tier.submit_store(job)
            tier.submit_load(JobMetadata(100 + number, keys(0), np.array([5]), True, context))
            tier.on_request_finished(context)
        tier.reset_cache()  # ends the stores, and not the requests
        gate.open()
        last = ReqContext("last")
        tier.on_new_request(last)
        tier.submit_store(JobMetadata(200, keys(7), np.array([1]), False, last))
        tier.on_request_finished(last)
        wait_until(lambda: slow.of("last")[-1:] == ["end"], 10)
        for number in range(3):
            calls = slow.of(f"{number}")
            assert (calls[0], calls[-1]) == ("begin", "end")
            assert calls.count("begin") == calls.count("end") == 1
    finally:
        gate.open()
        tier.shutdown()
