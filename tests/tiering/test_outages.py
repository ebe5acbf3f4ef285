"""The log has a line when a tier's outage begins and one when it ends, each time, at a bounded rate."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.tiering.conftest import LARGE_BUDGETS, Bench, MakeBench, ManualTier, keys
from tiered_kv.system.log_limit import KINDS_MAX, LogLimit
from tiered_kv.testing.control import ManualClock, wait_until
from tiered_kv.tiering.spell import LOGGED_AT_ONCE, LOGGED_PAUSE_S
from tiered_kv.toolkit.failure_texts import AGE_MAX_S, OF_LOOKUPS, FailureTexts

COOLDOWN_S = 2.0


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench({**LARGE_BUDGETS, "breaker_failures": 2, "breaker_cooldown": COOLDOWN_S})


class Log:
    """The lines of the log at WARNING; a background thread writes them soon."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def lines(self, count: int) -> list[str]:
        wait_until(lambda: len(self._caplog.messages) >= count)
        assert len(self._caplog.messages) == count, self._caplog.messages
        return self._caplog.messages[-1:]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


def fail(bench: Bench, number: int, *, reason: str = "unavailable") -> None:
    bench.store(keys(number), bench.request(f"request-{number}"))
    bench.manager.on_schedule_end()
    bench.end(success=False, reason=reason)


def recover(bench: Bench, number: int) -> None:
    bench.clock.advance(COOLDOWN_S)
    bench.manager.on_schedule_end()
    bench.store(keys(number), bench.request(f"request-{number}"))
    bench.manager.on_schedule_end()
    bench.end()


def outage(bench: Bench, number: int) -> None:
    fail(bench, 10 * number)
    fail(bench, 10 * number + 1)


def test_each_outage_is_logged_when_it_begins_and_when_it_ends(bench: Bench, log: Log) -> None:
    for number in range(3):
        outage(bench, number)
        (begun,) = log.lines(2 * number + 1)
        assert begun.startswith("tier 'tier0' is out of use: stores fail: the storage of the tier did not answer ('una")
        bench.store(keys(10 * number + 2, 10 * number + 3), bench.request(f"left-out-{number}"))
        recover(bench, 10 * number + 4)
        (ended,) = log.lines(2 * number + 2)
        assert ended.startswith(
            "tier 'tier0' works again after 2s; meanwhile 2 blocks were not stored there, and 0 not"
        )


def test_a_tier_that_fails_again_and_again_does_not_fill_the_log(bench: Bench, log: Log) -> None:
    for number in range(LOGGED_AT_ONCE + 20):
        outage(bench, number)
        recover(bench, 10 * number + 4)
    count = 2 * LOGGED_AT_ONCE + 2 * int(COOLDOWN_S * (LOGGED_AT_ONCE + 20) / LOGGED_PAUSE_S)
    log.lines(count)
    bench.clock.advance(LOGGED_AT_ONCE * LOGGED_PAUSE_S)
    outage(bench, 90)
    (begun,) = log.lines(count + 1)
    assert " outages before it were not logged)" in begun


def test_an_outage_that_lasts_is_logged_later_if_it_was_left_out(bench: Bench, log: Log) -> None:
    for number in range(LOGGED_AT_ONCE):
        outage(bench, number)
        recover(bench, 10 * number + 4)
    log.lines(2 * LOGGED_AT_ONCE)
    outage(bench, 50)
    bench.clock.advance(LOGGED_PAUSE_S)
    bench.manager.on_schedule_end()
    (begun,) = log.lines(2 * LOGGED_AT_ONCE + 1)
    assert "is out of use" in begun


def test_each_line_has_what_the_tier_says_of_its_newest_failure(
    bench: Bench, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"unavailable": "the server is away;\n start it", "": "the server\tis silent"}
    monkeypatch.setattr(ManualTier, "explain_failure", lambda tier, reason: said.get(reason))
    outage(bench, 0)
    assert "stores fail: the server is away; start it ('unavailable'). Its blocks" in log.lines(1)[0]
    recover(bench, 4)
    said["unavailable"] = "the server has too many clients"
    outage(bench, 1)
    assert "stores fail: the server has too many clients ('unavailable'). Its blocks" in log.lines(3)[0]
    recover(bench, 14)
    for failures in (1, 2):
        bench.tiers[0].lookup_failures = failures
        bench.manager.on_schedule_end()
    assert "lookups fail, or are not answered in time: the server is silent. Its blocks" in log.lines(5)[0]


@pytest.mark.parametrize("explained", [None, "", " \n", 5, b"bytes"])
def test_a_tier_that_explains_nothing_is_logged_with_its_reason(
    bench: Bench, log: Log, monkeypatch: pytest.MonkeyPatch, explained: object
) -> None:
    monkeypatch.setattr(ManualTier, "explain_failure", lambda tier, reason: explained)
    for number in (0, 1):
        fail(bench, number, reason="odd")
    assert "stores fail: the tier names the reason ('odd'). Its blocks" in log.lines(1)[0]


def test_each_time_that_a_storage_is_full_is_logged_when_it_begins_and_when_it_ends(bench: Bench, log: Log) -> None:
    for number in range(2):
        fail(bench, 10 * number, reason="no_space")
        bench.clock.advance(COOLDOWN_S)
        fail(bench, 10 * number + 1, reason="no_space")
        (begun,) = log.lines(2 * number + 1)
        assert begun.startswith("tier 'tier0' is full: stores fail: there was no room in the tier ('no_space')")
        bench.clock.advance(7.0)
        fail(bench, 10 * number + 2, reason="no_space")
        bench.store(keys(10 * number + 3), bench.request(f"room-{number}"))
        bench.manager.on_schedule_end()
        bench.end()
        (ended,) = log.lines(2 * number + 2)
        assert ended == "tier 'tier0' has room again after 7s; meanwhile 1 blocks were not stored there"


def test_a_storage_without_room_for_a_moment_is_not_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        fail(bench, 3 * number, reason="no_space")
        bench.clock.advance(COOLDOWN_S / 2)
        fail(bench, 3 * number + 1, reason="no_space")
        bench.clock.advance(COOLDOWN_S)
        bench.store(keys(3 * number + 2), bench.request(f"room-{number}"))
        bench.manager.on_schedule_end()
        bench.end()
    bench.manager.shutdown()
    assert caplog.messages == []


@pytest.mark.parametrize("reason", ["missing", "absent"])
def test_stores_into_a_place_that_is_gone_are_an_outage(bench: Bench, log: Log, reason: str) -> None:
    for number in (0, 1):
        fail(bench, number, reason=reason)
    assert log.lines(1)[0].startswith("tier 'tier0' is out of use: stores fail: ")


def test_a_text_of_an_earlier_outage_is_not_given_again() -> None:
    clock = ManualClock()
    texts = FailureTexts(clock)
    texts.note("timeout", "it is slow")
    texts.note(OF_LOOKUPS, "it is silent")
    assert (texts.of("timeout"), texts.of(OF_LOOKUPS), texts.of("other")) == ("it is slow", "it is silent", None)
    clock.advance(AGE_MAX_S + 1)
    assert texts.of("timeout") is texts.of(OF_LOOKUPS) is None


def test_lookups_that_fail_are_named_as_the_cause(bench: Bench, log: Log) -> None:
    for failures in (1, 2):
        bench.tiers[0].lookup_failures = failures
        bench.manager.on_schedule_end()
    assert "lookups fail" in log.lines(1)[0]


def test_a_tier_that_cannot_reset_is_logged(bench: Bench, log: Log) -> None:
    bench.tiers[0].can_reset = False
    bench.manager.reset_cache()
    assert "not used any more until this process ends: it cannot reset" in log.lines(1)[0]


def test_a_kind_of_line_comes_again_after_a_pause_with_the_count_of_those_left_out() -> None:
    clock = ManualClock()
    limit = LogLimit(60.0, 2, clock)
    assert [limit.take("a") for _ in range(5)] == [0, 0, None, None, None]
    assert limit.take("b") == 0
    clock.advance(60.0)
    assert [limit.take("a") for _ in range(2)] == [3, None]
    clock.advance(600.0)
    assert [limit.take("a") for _ in range(3)] == [1, 0, None]


def test_so_many_lines_come_at_once_whatever_the_clock_says() -> None:
    chance = random.Random(0)
    for _ in range(1000):
        now_s = chance.uniform(4000.0, 4096.0)  # the sum with 60 needs a bit more
        limit = LogLimit(60.0, 2, partial(float, now_s))
        assert [limit.take() for _ in range(3)] == [0, 0, None]


def test_kinds_without_end_take_no_memory_and_no_lines_without_end() -> None:
    clock = ManualClock()
    limit = LogLimit(60.0, 1, clock)
    assert [limit.take(kind) for kind in range(KINDS_MAX + 3)] == [0] * KINDS_MAX + [None] * 3
    clock.advance(60.0)
    assert limit.take("another") == 0
