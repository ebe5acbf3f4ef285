"""Batched lookups: deadlines, limits, and answers that are kept for the request that asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.testing.control import ManualClock
from tiered_kv.tiering.lookups import PENDING_KEYS_MAX, PROBE_KEYS_MAX, REQUESTS_MAX, BatchedLookups, Probe


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(8, "big"), 0)


class Desk:
    """Lookups whose runner is the test."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.starts = 0
        self.lookups = BatchedLookups(self._start, timeout_s=1.0, clock=clock)

    def _start(self) -> None:
        self.starts += 1

    def ask(self, *numbers: int, req_id: str = "a") -> list[bool | None]:
        return self.lookups.lookup_many([key_of(number) for number in numbers], ReqContext(req_id))

    def take(self) -> Probe:
        probe = self.lookups.take()
        assert probe is not None
        return probe


@pytest.fixture
def desk(clock: ManualClock) -> Desk:
    return Desk(clock)


def numbers_of(probe: Probe) -> Sequence[int]:
    return [int.from_bytes(key[:8], "big") for key in probe.keys]


def test_the_first_unanswered_key_starts_a_probe_and_later_ones_form_the_next(desk: Desk) -> None:
    assert desk.ask(1, 2, 3) == [None, None, None]
    assert desk.starts == 1
    first = desk.take()
    assert numbers_of(first) == [1, 2, 3]
    assert desk.ask(3, 4, 5) == [None, None, None]
    assert desk.starts == 1
    desk.lookups.answer(first, [True, False, True])
    assert desk.ask(1, 2, 3, 4) == [True, False, True, None]
    second = desk.take()
    assert numbers_of(second) == [4, 5]
    desk.lookups.answer(second, [True, True])
    assert desk.lookups.take() is None
    assert desk.ask(1, 2, 3, 4, 5) == [True, False, True, True, True]
    assert desk.starts == 1
    desk.ask(6)
    assert desk.starts == 2


def test_an_answer_is_forgotten_with_its_request_also_if_it_comes_later(desk: Desk) -> None:
    desk.ask(1, 2)
    first = desk.take()
    desk.lookups.answer(first, [True, True])
    assert desk.ask(1) == [True]
    desk.lookups.forget_request("a")
    assert desk.ask(1) == [None]
    second = desk.take()
    desk.lookups.forget_request("a")
    desk.lookups.answer(second, [True])
    assert desk.ask(1) == [None]


def test_a_key_without_an_answer_at_its_deadline_is_a_miss_for_good(desk: Desk) -> None:
    desk.ask(1)
    late = desk.take()
    desk.clock.advance(0.5)
    desk.ask(2)
    desk.clock.advance(0.5)
    assert desk.ask(1, 2) == [False, None]
    desk.lookups.answer(late, [True])
    assert desk.ask(1) == [False]
    assert desk.lookups.timeouts == 1


def test_a_runner_that_hangs_is_replaced(desk: Desk) -> None:
    desk.ask(1)
    desk.take()
    desk.clock.advance(1.0)
    assert desk.ask(1) == [False]
    assert desk.ask(2) == [None]
    assert desk.starts == 2
    assert numbers_of(desk.take()) == [2]


def test_late_keys_are_not_probed(desk: Desk) -> None:
    desk.ask(1)
    desk.clock.advance(2.0)
    desk.ask(2)
    assert numbers_of(desk.take()) == [2]


def test_without_a_request_an_answer_is_given_once(desk: Desk) -> None:
    desk.ask(1, req_id="")
    desk.lookups.answer(desk.take(), [True])
    assert desk.ask(1, req_id="") == [True]
    assert desk.ask(1, req_id="") == [None]


def test_a_probe_has_a_limit_and_the_rest_follows(desk: Desk) -> None:
    desk.ask(*range(PROBE_KEYS_MAX + 2))
    assert numbers_of(desk.take()) == list(range(PROBE_KEYS_MAX))
    assert numbers_of(desk.take()) == [PROBE_KEYS_MAX, PROBE_KEYS_MAX + 1]


def test_more_keys_than_may_wait_are_misses_at_once(desk: Desk) -> None:
    assert desk.ask(*range(PENDING_KEYS_MAX + 1)) == [None] * PENDING_KEYS_MAX + [False]
    assert desk.lookups.refused == 1
    desk.clock.advance(1.0)
    assert desk.ask(PENDING_KEYS_MAX + 1) == [False]  # it finds the queue full, and empties it
    desk.lookups.take()
    assert desk.ask(PENDING_KEYS_MAX + 2) == [None]


def test_a_key_whose_answer_is_not_known_is_probed_again_until_its_deadline(desk: Desk) -> None:
    assert desk.ask(1, 2) == [None, None]
    desk.lookups.answer(desk.take(), [None, True])
    assert desk.lookups.take() is None
    assert desk.ask(1, 2) == [None, True]
    assert desk.starts == 2
    desk.lookups.answer(desk.take(), [None])
    desk.clock.advance(1.0)
    assert desk.ask(1) == [False]
    assert desk.lookups.timeouts == 1


def test_more_requests_than_are_kept_forget_the_oldest(desk: Desk) -> None:
    for number in range(REQUESTS_MAX + 1):
        desk.ask(1, req_id=str(number))
    desk.lookups.answer(desk.take(), [True])
    assert desk.ask(1, req_id=str(REQUESTS_MAX)) == desk.ask(1, req_id="1") == [True]
    assert desk.ask(1, req_id="0") == [None]


def test_no_key_is_lost_between_the_scheduler_and_its_runners() -> None:
    wanted = threading.Semaphore(0)
    done = threading.Event()
    batched = BatchedLookups(wanted.release, timeout_s=60.0)

    def run() -> None:
        while wanted.acquire() and not done.is_set():
            while (probe := batched.take()) is not None:
                batched.answer(probe, [key[7] % 2 == 0 for key in probe.keys])

    runners = [threading.Thread(target=run) for _ in range(2)]
    for runner in runners:
        runner.start()
    try:
        for number in range(2000):
            while (answer := batched.lookup_many([key_of(number)], ReqContext("a"))[0]) is None:
                time.sleep(0)  # let the runners have the interpreter
            assert answer is (number % 2 == 0)
    finally:
        done.set()
        wanted.release(2)
        for runner in runners:
            runner.join()
    assert batched.timeouts == 0
