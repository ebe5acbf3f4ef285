"""A signal handler that raises amid a call, and threads that the system refuses: the calls after it work.

A sample of the proof in `tests/trust/test_interrupts.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType

import numpy as np
import pytest

from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier
from tests.support.interrupt_cases import BLOCK_BYTES, BLOCKS, CONTENT, WAIT_S, check_stack, interrupt_call, new_keys
from tests.support.interrupts import Interrupt, handled, interrupt, interrupts, signal_main_thread, signalled
from tests.support.shortages import Resource, Shortage, outage
from tests.support.stacks import PATIENT, Register, stack_of
from tests.support.threads import no_threads
from tiered_kv.errors import ResourceError, ShutdownError
from tiered_kv.stack.open import open_stack
from tiered_kv.system import interrupts as call_threads
from tiered_kv.system.threads import DaemonThreads, call_within, run_all, start_thread
from tiered_kv.tiering.base import TierSpec

MEMORY: dict[str, object] = {"type": "memory", "capacity": "1 MiB", **PATIENT}


@pytest.mark.one_quick(3)
@pytest.mark.parametrize(
    ("over", "verb"),
    [("stack", "put"), ("stack", "get"), ("stack", "close"), ("direct", "wait-store"), ("direct", "close")],
)
def test_an_interrupted_call_leaves_nothing_behind(over: str, verb: str) -> None:
    assert interrupt_call(over, verb, MEMORY, 12)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt of a generator's close
@pytest.mark.parametrize("over", ["stack", "direct"])
def test_an_interrupted_opening_leaves_nothing_open(over: str) -> None:
    assert interrupt_call(over, "open", MEMORY, 199)


def test_a_call_with_a_limit_may_be_interrupted_wherever_a_handler_runs() -> None:
    ends: list[None] = []
    count = sum(
        1
        for _ in interrupts(
            lambda: lambda: call_within(WAIT_S, lambda: ends.append(None), "limited"), where_handlers_run=True
        )
    )
    assert count
    assert ends


@pytest.fixture
def held(register: Register, closing: ExitStack) -> Gate:
    """Register the tier `held`, with a budget of two blocks, which ends no job before the gate opens."""
    gate = Gate(is_open=False)
    closing.callback(gate.open)

    class Held(HeldJobsTier):
        def __init__(self, spec: TierSpec, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type), gate)

    register("held", Held)
    return gate


HELD: dict[str, object] = {"type": "held", "store_budget": 2 * BLOCK_BYTES, **PATIENT}


def test_a_put_that_waits_for_room_ends_when_it_is_interrupted(held: Gate) -> None:
    with open_stack(stack_of(HELD, blocks=BLOCKS)) as stack:
        assert stack.put(new_keys(2), CONTENT[:2]) == 2
        began_s = time.monotonic()
        with pytest.raises(Interrupt), signalled(interrupt, 0.05):
            stack.put(new_keys(2), CONTENT[:2], timeout=10 * WAIT_S)
        assert time.monotonic() - began_s < WAIT_S
        held.open()
        check_stack(stack)


def test_a_handler_may_close_the_stack_while_a_call_waits(held: Gate) -> None:
    stack = open_stack(stack_of(HELD, blocks=BLOCKS))
    assert stack.put(new_keys(2), CONTENT[:2]) == 2

    def close(number: int, frame: FrameType | None) -> None:
        try:
            stack.close(timeout=0.1)
        finally:
            held.open()

    with signalled(close, 0.05), pytest.raises(ShutdownError):
        stack.put(new_keys(2), CONTENT[:2], timeout=10 * WAIT_S)


def test_an_interrupted_caller_waits_a_limited_time_for_a_call_that_hangs(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_threads, "_END_S", 0.1)
    gate.close()
    calls, began_s, undone = call_threads.CallThread("tiered-kv-calls"), time.monotonic(), Gate(is_open=False)

    def hang() -> bool:
        signal_main_thread()
        gate.pass_through()
        return True

    with handled(interrupt), pytest.raises(Interrupt):
        calls.run(hang, undo=lambda _: undone.open())
    assert time.monotonic() - began_s < WAIT_S / 2
    gate.open()
    undone.pass_through()


def test_without_a_thread_for_it_a_call_runs_all_the_same() -> None:
    with open_stack(stack_of(blocks=BLOCKS)) as stack, no_threads():
        keys = new_keys(2)
        assert stack.put(keys, CONTENT[:2]) == 2
        assert stack.get(keys, np.zeros_like(CONTENT[:2])) == 2


# Threads that the system refuses: a call that was refused never runs, and others go on with the threads there are.


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
