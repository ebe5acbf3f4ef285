"""Threads that the system refuses: a call that was refused never runs, and others go on with the threads there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.shortages import Resource, Shortage, outage
from tiered_kv.errors import ResourceError
from tiered_kv.threads import DaemonThreads, run_all, start_thread

WAIT_S = 30.0


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    threads = DaemonThreads("tiered-kv-test", 2)
    yield threads
    threads.shutdown()
    threads.join(time.monotonic() + WAIT_S)


def test_a_thread_that_cannot_start_is_an_error_that_says_what_to_do() -> None:
    with outage(Resource.THREAD), pytest.raises(ResourceError, match=r"'mine' cannot be started: .*pids\.max"):
        start_thread(lambda: None, "mine")


def test_a_call_that_was_refused_never_runs(threads: DaemonThreads) -> None:
    ran: list[str] = []
    with outage(Resource.THREAD), pytest.raises(ResourceError):
        threads.submit(ran.append, "refused")
    threads.submit(ran.append, "accepted").result(WAIT_S)
    assert ran == ["accepted"]


def test_without_a_further_thread_the_running_ones_suffice(threads: DaemonThreads) -> None:
    with Shortage(Resource.THREAD, 2) as shortage:
        used = {threads.submit(threading.get_ident).result(WAIT_S) for _ in range(2)}
    assert shortage.refused
    assert len(used) == 1


def test_calls_that_have_not_begun_can_be_cancelled(threads: DaemonThreads) -> None:
    have_begun, may_go_on = threading.Barrier(3), threading.Event()

    def wait() -> bool:
        have_begun.wait(WAIT_S)
        return may_go_on.wait(WAIT_S)

    running = [threads.submit(wait) for _ in range(2)]
    have_begun.wait(WAIT_S)
    waiting = threads.submit(may_go_on.wait)
    threads.shutdown(cancel_futures=True)
    may_go_on.set()
    assert all(each.result(WAIT_S) for each in running)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(may_go_on.wait)


@pytest.mark.parametrize("first_refused", [1, 2, 100])
def test_all_items_are_done_however_many_threads_there_are(first_refused: int) -> None:
    def halve(number: int) -> int:
        if number % 2:
            raise ValueError(number)
        return number // 2

    with Shortage(Resource.THREAD, first_refused, 100):
        calls = run_all(halve, range(50), "tiered-kv-test", 4)
    assert [call.result() for call in calls[::2]] == list(range(25))
    assert all(isinstance(call.exception(), ValueError) for call in calls[1::2])
