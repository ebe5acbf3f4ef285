"""A request's event loop gives its coroutine's result, or ends it in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tiered_kv_object import loop
from tiered_kv_object.loop import run_within

LIMIT_S = 60.0


async def answered(delay_s: float, value: int) -> int:
    """Return a value that another thread gives, as obstore's threads do."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()

    def answer() -> None:
        if not future.done():
            future.set_result(value)

    threading.Timer(delay_s, loop.call_soon_threadsafe, [answer]).start()
    return await future


@pytest.fixture(autouse=True)
def no_timers() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(LIMIT_S)


def test_a_result_comes_from_another_thread() -> None:
    assert run_within(answered(0.01, 7), LIMIT_S) == 7
    assert asyncio._get_running_loop() is None


def test_an_exception_is_raised_and_keeps_nothing_alive() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    def alive() -> int:
        return sum(isinstance(each, (asyncio.AbstractEventLoop, asyncio.Task)) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()  # other tests and libraries may keep some
        with pytest.raises(KeyError) as raised:
            run_within(fail(), LIMIT_S)
        del raised
        assert alive() == before
    finally:
        gc.enable()


def test_a_coroutine_is_cancelled_at_its_limit_and_has_ended_then() -> None:
    steps: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            steps.append("cancelled")
            await asyncio.sleep(0.01)
            steps.append("ended")

    begin_s = time.monotonic()
    with pytest.raises(TimeoutError):
        run_within(hang(), 0.05)
    assert steps == ["cancelled", "ended"]
    assert time.monotonic() - begin_s >= 0.06


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_coroutine_that_does_not_end_is_left_after_a_grace(is_waiting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GRACE_S", 0.05)
    has_closed = []

    async def ignore() -> None:
        try:
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600 if is_waiting else 0)
        finally:
            has_closed.append(True)

    with pytest.raises(TimeoutError):
        run_within(ignore(), 0.01)
    assert has_closed


def test_a_task_that_cannot_be_stepped_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a thread that runs another task, from Python 3.14 on."""
    monkeypatch.setattr(loop, "GRACE_S", 0.05)
    monkeypatch.setattr(asyncio.Handle, "_run", lambda self: None)
    with pytest.raises(TimeoutError):
        run_within(answered(0.0, 1), 0.01)


def test_many_requests_run_at_once_each_with_its_limit() -> None:
    room = asyncio.Semaphore(4)

    async def one(number: int) -> int:
        async with room:
            try:
                async with asyncio.timeout(0.05 if number % 3 == 0 else LIMIT_S):
                    if number % 3 == 0:
                        await asyncio.get_running_loop().create_future()
                    return await answered(0.001, number)
            except TimeoutError:
                return -1

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*map(one, range(12)))

    found = run_within(all_of_them(), LIMIT_S)
    assert found == [number if number % 3 else -1 for number in range(12)]


def test_an_answer_that_comes_after_the_end_goes_nowhere() -> None:
    with pytest.raises(TimeoutError):
        run_within(answered(0.1, 1), 0.01)


def test_it_opens_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    assert run_within(opened(), LIMIT_S) == before


def test_it_runs_within_another_loop_s_thread() -> None:
    async def outer() -> tuple[asyncio.AbstractEventLoop, bool]:
        task = asyncio.current_task()
        assert run_within(answered(0.0, 1), LIMIT_S) == 1
        await asyncio.sleep(0)
        return asyncio.get_running_loop(), asyncio.current_task() is task

    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(outer()) == (loop, True)
    finally:
        loop.close()
