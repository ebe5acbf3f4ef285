"""A tier that fails several times in a row gets no jobs until a probe succeeds."""

from __future__ import annotations

import pytest

from tests.tiering.conftest import LARGE_BUDGETS, MakeBench
from tiered_kv.reasons import RecordStatus
from tiered_kv.tiering.breaker import Breaker


def state_of(breaker: Breaker) -> str:
    return breaker.state.name.lower()


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=3, cooldown_s=5)
    for _ in range(10):
        breaker.fail(0)
        breaker.fail(0)
        breaker.succeed()
    assert state_of(breaker) == "closed"
    for _ in range(3):
        breaker.fail(0)
    assert state_of(breaker) == "open"
    assert breaker.times_opened == 1


def test_an_open_breaker_half_opens_after_its_cooldown_and_reopens_on_the_first_failure() -> None:
    breaker = Breaker(failures_max=1, cooldown_s=5)
    breaker.fail(now_s=100)
    breaker.tick(104.9)
    assert state_of(breaker) == "open"
    breaker.tick(105)
    assert state_of(breaker) == "half_open"
    breaker.fail(106)
    breaker.tick(110)
    assert state_of(breaker) == "open"
    breaker.tick(111)
    breaker.succeed()
    assert state_of(breaker) == "closed"
    assert breaker.times_opened == 2


def test_late_failures_do_not_delay_the_probe() -> None:
    breaker = Breaker(failures_max=1, cooldown_s=5)
    breaker.fail(100)
    for straggler_s in (101, 103, 104.9):
        breaker.fail(straggler_s)
    breaker.tick(105)
    assert state_of(breaker) == "half_open"
    assert breaker.times_opened == 1


def test_a_late_answer_lets_a_probe_through_at_once() -> None:
    breaker = Breaker(failures_max=1, cooldown_s=5)
    breaker.fail(0)
    breaker.answer()
    assert state_of(breaker) == "half_open"
    breaker.succeed()
    breaker.answer()
    assert state_of(breaker) == "closed"


HARMLESS = {status.value for status in RecordStatus if status is not RecordStatus.OK} | {
    *("absent", "missing", "no_space", "reset", "unanswered")
}


@pytest.mark.parametrize(
    ("reasons", "times_opened"), [(HARMLESS, 0), ({"unavailable", "timeout", "exception", "failed"}, 1)]
)
def test_lost_and_damaged_blocks_do_not_open_the_breaker(
    make_bench: MakeBench, reasons: set[str], times_opened: int
) -> None:
    for reason in reasons:
        bench = make_bench({**LARGE_BUDGETS, "breaker_failures": 1})
        bench.promote(1)
        bench.end(success=False, reason=reason)
        assert bench.counter("breaker_opened_total") == times_opened, reason
