"""The bound on the time that a request waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tiering.conftest import LARGE_BUDGETS, LOOKUP_TIMEOUT_S, Bench, MakeBench, ManualTier, keys
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.hints import HINTS_KEY
from tiered_kv.tiering.lookups import BatchedLookups, Probe, Question
from tiered_kv.tiering.requests import ManagerLimits


def answers_nothing(bench: Bench) -> None:
    bench.tier.has(6, answer=None)


def has_no_room(bench: Bench) -> None:
    bench.tier.has(*range(7))
    bench.lookup(keys(*range(6)), bench.request("hoarder"))


def is_stored_by_another(bench: Bench) -> None:
    bench.manager.prepare_store(keys(6), bench.request("writer"))


def is_on_its_way(bench: Bench) -> None:
    bench.tier.has(6)


def answer_in_next_step(tier: ManualTier, bench: Bench, answer: bool, keys_a_step: int = 1000) -> None:
    """Let a tier answer lookups at the end of a step, as one with a remote index does; a slow one, a few of them."""
    lookups = BatchedLookups(lambda: None, timeout_s=3600, clock=bench.clock)
    waiting: list[Question] = []

    def end_step() -> None:
        while (probe := lookups.take()) is not None:
            waiting.extend(probe.questions)
        answered, waiting[:] = waiting[:keys_a_step], waiting[keys_a_step:]
        if answered:
            probe = Probe([question.key for question in answered], answered[0].deadline, answered)
            lookups.answer(probe, [answer] * len(answered))

    tier.lookup = lambda key, req_context: lookups.lookup_many([key], req_context)[0]  # type: ignore[method-assign]
    tier.lookup_many = lookups.lookup_many  # type: ignore[method-assign]
    tier.on_schedule_end = end_step  # type: ignore[method-assign]


@pytest.fixture
def patient(make_bench: MakeBench) -> Bench:
    """A manager whose tier may take as long as it likes."""
    return make_bench({**LARGE_BUDGETS, "job_timeout": 86400, "lookup_timeout": 3600})


def ask_on(bench: Bench, wanted: list[OffloadKey], context: ReqContext, seconds: float) -> list[object]:
    """Look up twice a second, each time in a separate step; return the answers without repetitions."""
    told: list[object] = []
    for _ in range(int(2 * seconds)):
        answers = bench.lookup(wanted, context)
        if answers != told[-1:]:
            told += answers
        bench.step()
        bench.clock.advance(0.5)
        bench.step()
    return told


def test_how_long_a_tier_took_to_answer_is_counted(patient: Bench) -> None:
    answers_nothing(patient)
    context = patient.request("a")
    assert ask_on(patient, keys(6), context, 3.0) == [None]
    patient.tier.has(6, answer=False)
    assert patient.lookup(keys(6), context) == [False]
    (told,) = [each for name, each in patient.manager.counters().items() if name != "cpu"]
    assert (told["lookup_seconds"]["count"], told["lookup_seconds"]["sum"]) == (1, 3.0)


def test_a_request_that_has_waited_takes_no_room_any_more(patient: Bench) -> None:
    answers_nothing(patient)
    patient.store(keys(1), patient.request("other"))
    context = patient.request("a")
    ask_on(patient, keys(6), context, patient.limits.wait_max_s)
    patient.tier.end()
    is_on_its_way(patient)
    assert patient.manager.lookup_many(keys(1, 6), context) == [True, False], "what is ready is found"
    patient.manager.on_new_request(ReqContext("b", {HINTS_KEY: {"skip": "load"}}))
    assert patient.lookup(keys(1, 6), context) == [True, False], "beside a request that skips loads, too"
    patient.step()
    assert not patient.jobs


def test_a_request_that_loads_its_promoted_blocks_may_wait_again(patient: Bench) -> None:
    context = patient.request("a")
    for number in range(4):
        patient.tier.has(number)
        assert ask_on(patient, keys(number), context, patient.limits.wait_max_s - 1) == [None]
        patient.end()
        assert patient.lookup(keys(number), context) == [True]
        patient.load(keys(number), context)


def test_loading_blocks_that_were_ready_does_not_lengthen_the_wait(patient: Bench) -> None:
    patient.store(keys(1), patient.request("other"))
    is_on_its_way(patient)
    context = patient.request("a")
    for _ in range(int(patient.limits.wait_max_s)):
        assert ask_on(patient, keys(6), context, 1) == [None]
        patient.load(keys(1), context)
    assert patient.lookup(keys(6), context) == [False]


def test_an_engine_that_does_not_ask_does_not_wait(patient: Bench) -> None:
    is_on_its_way(patient)
    context = patient.request("a")
    for _ in range(10):
        assert patient.lookup(keys(6), context) == [None]
        patient.clock.advance(patient.limits.wait_max_s)
        patient.step()


def test_a_lookup_that_is_never_answered_is_a_miss_in_time(bench: Bench) -> None:
    bench.tier.has(1, 2, answer=None)
    context = bench.request("a")
    assert bench.lookup(keys(1, 2), context) == [None, None]
    bench.clock.advance(LOOKUP_TIMEOUT_S)
    assert bench.lookup(keys(1, 2, 3), context) == [False, False, False]
    assert bench.counter("lookup_timeouts_total") == 1


def test_waiting_is_counted_anew_after_an_answer(bench: Bench) -> None:
    bench.tier.has(1, answer=None)
    context = bench.request("a")
    bench.lookup(keys(1), context)
    bench.tier.has()
    assert bench.lookup(keys(1), context) == [False]
    bench.clock.advance(5)
    bench.tier.has(1, answer=None)
    assert bench.lookup(keys(1), context) == [None]
    assert bench.counter("lookup_timeouts_total") == 0


def test_a_request_without_an_id_asks_in_vain_for_a_while_only(bench: Bench) -> None:
    bench.tier.has(1, answer=None)
    assert bench.lookup(keys(1), ReqContext()) == [None]
    bench.clock.advance(LOOKUP_TIMEOUT_S)
    assert bench.lookup(keys(1), ReqContext()) == [False]
    bench.tier.has(2)
    bench.clock.advance(2 * bench.limits.wait_max_s)
    bench.step()
    assert bench.lookup(keys(2), ReqContext()) == [None]
    bench.step()
    bench.end(success=False)
    assert bench.lookup(keys(2), ReqContext()) == [False], "no loop between lookup and load"
    bench.clock.advance(2 * bench.limits.wait_max_s)
    bench.step()
    assert bench.lookup(keys(2), ReqContext()) == [None]
    assert False in ask_on(bench, keys(2), ReqContext(), 2 * bench.limits.wait_max_s)


@pytest.mark.parametrize("block", [answers_nothing, has_no_room, is_stored_by_another, is_on_its_way])
@pytest.mark.parametrize("begins_at", [0.0, 0.5, 1.0, 1.1, 1.5, 1.9])
def test_a_request_without_an_id_waits_no_longer_than_others(
    patient: Bench, block: Callable[[Bench], None], begins_at: float
) -> None:
    wait_s = patient.limits.wait_max_s
    patient.lookup(keys(7), ReqContext())
    patient.step()
    patient.clock.advance(begins_at * wait_s)
    block(patient)
    answers = ask_on(patient, keys(6), ReqContext(), wait_s + 1)
    assert answers[:2] == [None, False]


@pytest.mark.parametrize("found_in", [0, 2, None])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("keys_a_step", [1000, 1])
def test_a_request_without_an_id_asks_as_often_as_others(
    make_bench: MakeBench, keys_a_step: int, many: bool, found_in: int | None
) -> None:
    def asked(req_id: str) -> int:
        """Return how many lookups were answered None before a promotion, or a miss."""
        bench = make_bench(*[{**LARGE_BUDGETS, "lookup_timeout": 3600}] * 3)
        for number, tier in enumerate(bench.tiers):
            answer_in_next_step(tier, bench, number == found_in, keys_a_step)
        bench.step()
        context = bench.request(req_id)
        for count in range(100):
            if many:
                answers = bench.manager.lookup_many(keys(1, 2, 3), context)
            else:
                answers = bench.lookup(keys(1, 2, 3), context)
            if None not in answers or bench.jobs:
                return count
            bench.step()
        raise AssertionError("no answer")

    assert asked("") == asked("a")


def test_a_request_without_an_id_that_has_its_answers_asks_anew(make_bench: MakeBench) -> None:
    bench = make_bench({**LARGE_BUDGETS, "lookup_timeout": 3600})
    bench.tier.has(1, answer=None)
    assert bench.lookup(keys(1), ReqContext()) == [None]
    bench.step()
    bench.tier.has()
    assert bench.lookup(keys(1), ReqContext()) == [False]
    bench.step()
    bench.tier.has(1)
    assert bench.lookup(keys(1), ReqContext()) == [None]
    bench.step()
    assert bench.jobs == [keys(1)]


def test_requests_that_are_never_finished_do_not_pile_up(make_bench: MakeBench) -> None:
    bench = make_bench(limits=ManagerLimits(requests_max=10))
    for number in range(100):
        bench.lookup(keys(number), ReqContext(f"r{number}"))
        bench.lookup(keys(number), ReqContext())
    assert bench.counter("forgotten_requests_total", tier="cpu") >= 90
