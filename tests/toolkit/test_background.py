"""A background task runs after every request, on one thread, whatever it raises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.threads import no_threads
from tiered_kv.toolkit.background import BackgroundTask, logger


def test_a_request_while_it_runs_makes_it_run_again() -> None:
    begun, goes_on = threading.Semaphore(0), threading.Semaphore(0)
    threads: list[threading.Thread] = []

    def work() -> None:
        threads.append(threading.current_thread())
        begun.release()
        assert goes_on.acquire(timeout=60.0)

    task = BackgroundTask(work, "a task")
    task.ask()
    assert begun.acquire(timeout=60.0)
    for _ in range(3):
        task.ask()
    assert not task.join(0.0)
    goes_on.release(2)
    assert task.join(60.0)
    assert len(threads) == 2
    assert threads[0] is threads[1] is not threading.current_thread()


def test_no_request_is_lost_while_the_thread_ends() -> None:
    asked: list[int] = []
    done: list[int] = []
    task = BackgroundTask(lambda: done.append(len(asked)), "a task")
    for number in range(2000):
        asked.append(number)
        task.ask()
    assert task.join(60.0)
    assert done[-1] == 2000


def test_without_a_thread_it_is_left_to_the_next_request() -> None:
    done = threading.Event()
    task = BackgroundTask(done.set, "a task")
    with no_threads():
        task.ask()
    assert task.join(0.0)
    assert not done.is_set()
    task.ask()
    assert done.wait(60.0)


@pytest.fixture
def log() -> Iterator[Callable[[logging.Handler], None]]:
    """Add handlers to the module's logger until the test ends."""
    before = list(logger.handlers)
    yield logger.addHandler
    logger.handlers[:] = before


@pytest.mark.parametrize("error", [OSError, SystemExit])
@pytest.mark.parametrize("handler_raises", [False, True])
def test_an_exception_is_logged_and_the_next_request_is_served(
    error: type[BaseException], handler_raises: bool, log: Callable[[logging.Handler], None]
) -> None:
    begun, goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        assert goes_on.acquire(timeout=60.0)
        raise error

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            if handler_raises:
                raise ValueError

    logged: list[str] = []
    log(Handler())
    task = BackgroundTask(work, "a task")
    task.ask()
    assert begun.acquire(timeout=60.0)
    task.ask()
    goes_on.release(2)
    assert begun.acquire(timeout=60.0), "the request while it failed is lost"
    assert task.join(60.0)
    assert logged == ["a task failed"] * 2
