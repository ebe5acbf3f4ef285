"""A scheduler's step is marked from its first call to its end, and delays workers within bounds."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.stacks import BUILT_IN_TIERS, IN_DIRECTORIES, PATIENT, stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.system import step as step_module
from tiered_kv.system.step import IDLE_WAIT, IDLE_WAIT_S_MAX, PAUSES_MAX, STEP, Step, give_way, wait_for_idle
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.manager import TieringOffloadingManager

HAS_LOCK = getattr(sys, "_is_gil_enabled", lambda: True)()
CONTEXT = ReqContext("r")
KEYS = make_keys(2)
FIRST_CALLS: dict[str, Callable[[TieringOffloadingManager], object]] = {
    "lookup": lambda manager: manager.lookup(KEYS[0], CONTEXT),
    "lookup_many": lambda manager: manager.lookup_many(KEYS, CONTEXT),
    "prepare_store": lambda manager: manager.prepare_store(KEYS, CONTEXT),
    "prepare_load": lambda manager: manager.prepare_load((), CONTEXT),
}


@pytest.fixture
def stack() -> Iterator[EngineStack]:
    with open_engine_stack(stack_of(blocks=8)) as opened:
        yield opened


@pytest.mark.parametrize("first_call", FIRST_CALLS)
def test_a_step_is_marked_until_it_ends(stack: EngineStack, first_call: str) -> None:
    stack.manager.on_schedule_end()
    assert STEP.pauses_left == 0
    FIRST_CALLS[first_call](stack.manager)
    assert STEP.pauses_left == PAUSES_MAX
    give_way()
    assert STEP.pauses_left == PAUSES_MAX - 1
    stack.manager.on_schedule_end()
    assert STEP.pauses_left == 0


def test_a_step_without_an_end_delays_workers_a_limited_number_of_times(stack: EngineStack) -> None:
    stack.manager.lookup(KEYS[0], CONTEXT)
    for _ in range(PAUSES_MAX + 10):
        give_way()
    assert STEP.pauses_left == 0


def replace_time(monkeypatch: pytest.MonkeyPatch, computed_s: Callable[[float], float]) -> list[float]:
    """Return the time, which a sleep moves; by it the engine's thread has computed for `computed_s`."""
    now_s = [100.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(
        monotonic=lambda: now_s[0],
        sleep=sleep,
        pthread_getcpuclockid=lambda thread: 7,
        clock_gettime=lambda clock_id: computed_s(now_s[0]),
    )
    monkeypatch.setattr(step_module, "time", clock)
    return now_s


@pytest.fixture
def patience() -> Iterator[None]:
    """Let this thread wait for the engine as a thread that stores does."""
    IDLE_WAIT.left_s = IDLE_WAIT_S_MAX
    yield
    IDLE_WAIT.left_s = 0.0


@pytest.mark.parametrize("wait", [wait_for_idle, give_way])
@pytest.mark.parametrize(("used_s", "waited_s"), [(math.inf, IDLE_WAIT_S_MAX), (0.0, 0.0), (0.005, 0.004)])
def test_stores_wait_while_the_engine_computes_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, patience: None, wait: Callable[[], None], used_s: float, waited_s: float
) -> None:
    now_s = replace_time(monkeypatch, lambda at_s: min(at_s - 100.0, used_s))
    monkeypatch.setattr(step_module, "STEP", step := Step())
    wait()
    assert now_s == [100.0], "no scheduler is known"
    step.end()
    step.is_busy()  # the first sample
    now_s[0] += 0.001
    wait()
    assert waited_s - 1e-9 <= now_s[0] - 100.001 <= min(3 * waited_s, IDLE_WAIT_S_MAX) + 1e-9
    assert (IDLE_WAIT.left_s > 0.0) is (used_s < math.inf)
    before_s = now_s[0]
    IDLE_WAIT.left_s = 0.0
    wait()
    assert now_s[0] == before_s, "other threads do not wait, nor this one any more"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_an_engine_that_waits_for_the_interpreter_is_no_idle_one(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Beside a busy worker the engine computes for some microseconds, and waits as long for the lock."""
    now_s = replace_time(monkeypatch, lambda at_s: share * (at_s - 100.0))
    step = Step()
    step.end()
    step.is_busy()  # the first sample
    now_s[0] += 0.0003
    assert step.is_busy() is (share > 0.0)


def test_what_the_engine_did_long_ago_does_not_tell_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = replace_time(monkeypatch, lambda at_s: min(at_s - 100.0, 0.01))
    step = Step()
    step.end()
    step.is_busy()  # the first sample
    now_s[0] += 0.1
    assert step.is_busy() is None, "it may have computed just now"
    now_s[0] += 0.1
    assert step.is_busy() is False, "it has not computed at all"


def test_one_thread_watches_the_engine_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes the interpreter from the engine."""
    looking: set[int] = set()
    is_idle = threading.Event()

    def is_busy(_: Step) -> bool:
        looking.add(threading.get_ident())
        return not is_idle.is_set()

    def wait() -> None:
        IDLE_WAIT.left_s = 60.0
        wait_for_idle()

    monkeypatch.setattr(Step, "is_busy", is_busy)
    workers = [threading.Thread(target=wait) for _ in range(4)]
    for worker in workers:
        worker.start()
    wait_until(lambda: len(looking) == len(workers))  # each has looked once
    time.sleep(0.01)
    looking.clear()
    time.sleep(0.03)
    assert len(looking) <= 1
    is_idle.set()
    for worker in workers:
        worker.join()


def test_the_next_thread_of_an_engine_may_have_the_identity_of_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, now_s = iter((1, 2)), [100.0]

    def clock_gettime(clock_id: int) -> float:
        if clock_id == 1:
            raise OSError
        return now_s[0] - 100.0  # it computes

    clock = SimpleNamespace(
        monotonic=lambda: now_s[0], pthread_getcpuclockid=lambda thread: next(clocks), clock_gettime=clock_gettime
    )
    monkeypatch.setattr(step_module, "time", clock)
    step = Step()
    step.end()
    assert not step.is_busy(), "its thread has ended"
    step.end()
    step.is_busy()  # the first sample
    now_s[0] += 0.001
    assert step.is_busy()


def test_the_thread_of_an_engine_may_end(stack: EngineStack, patience: None) -> None:
    engine = threading.Thread(target=stack.manager.on_schedule_end)
    engine.start()
    engine.join()
    wait_for_idle()
    stack.manager.on_schedule_end()


def test_a_thread_that_computes_is_told_from_one_that_waits() -> None:
    step, is_computing, is_over = Step(), threading.Event(), threading.Event()

    def engine() -> None:
        step.end()
        while not is_over.wait(0.001):
            while is_computing.is_set():
                sum(range(1000))

    def is_busy() -> bool:
        step.is_busy()
        time.sleep(0.002)
        return step.is_busy() is True

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        wait_until(lambda: not is_busy())
        is_computing.set()
        wait_until(is_busy)
        is_computing.clear()
        wait_until(lambda: not is_busy())
    finally:
        is_computing.clear()
        is_over.set()
        thread.join()


class OtherThread:
    """A thread that would compute whenever the scheduler's thread released the interpreter."""

    def __init__(self) -> None:
        self._turns = 0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run)
        self._interval_s = sys.getswitchinterval()

    def __enter__(self) -> OtherThread:
        gc.disable()  # a collection could close another test's files, which releases the interpreter
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        sys.setswitchinterval(self._interval_s)
        gc.enable()
        self._is_stopped = True
        self._thread.join()

    def turns_during(self, call: Callable[[], object]) -> int:
        """Return how often it could compute during `call`; Python itself takes the interpreter from no thread."""
        sys.setswitchinterval(1000)
        time.sleep(0.01)  # from here on each thread waits with the new interval
        before = self._turns
        call()
        turns = self._turns - before
        sys.setswitchinterval(self._interval_s)
        return turns

    def _run(self) -> None:
        while not self._is_stopped:
            self._turns += 1
            time.sleep(0)


@pytest.mark.skipif(not HAS_LOCK, reason="this Python runs without the interpreter's lock: nothing takes it")
@pytest.mark.parametrize("tier", ["memory", "nvme"])
def test_no_call_of_a_step_lets_another_thread_take_the_interpreter(tmp_path: Path, tier: str) -> None:
    """A scheduler that releases CPython's lock waits up to 5 ms for each thread that takes it."""
    entry = {
        "type": tier,
        **BUILT_IN_TIERS[tier],
        **PATIENT,
        **({"path": str(tmp_path)} if tier in IN_DIRECTORIES else {}),
    }
    count = 600  # numpy releases the lock for arrays of more than 500
    with open_engine_stack(stack_of(entry, blocks=2 * count)) as stack, OtherThread() as other:
        manager = stack.manager

        def turns_of_steps(keys: list[OffloadKey], context: ReqContext) -> dict[str, int]:
            """Run steps that store blocks and load them; return the turns of the other thread."""
            turns = {
                "miss": other.turns_during(lambda: [manager.lookup(key, context) for key in keys]),
                "prepare_store": other.turns_during(lambda: manager.prepare_store(keys, context)),
                "complete_store": other.turns_during(lambda: manager.complete_store(keys, context)),
                "end of store": other.turns_during(manager.on_schedule_end),
            }
            assert manager.drain_jobs(60)
            return turns | {
                "hit": other.turns_during(lambda: manager.lookup_many(keys, context)),
                "prepare_load": other.turns_during(lambda: manager.prepare_load(keys, context)),
                "complete_load": other.turns_during(lambda: manager.complete_load(keys, context)),
                "end of load": other.turns_during(manager.on_schedule_end),
                "end of request": other.turns_during(lambda: manager.on_request_finished(context)),
            }

        first, second, third = (make_keys(count, str(number)) for number in range(3))
        turns_of_steps(first, ReqContext("first"))  # starts the threads
        for keys in (second, third):
            turns = turns_of_steps(keys, ReqContext(keys[0].hex()))
            assert turns == dict.fromkeys(turns, 0)
        context, answers = ReqContext("promotion"), list[bool | None]()
        for _ in range(1000):
            answers.clear()
            assert other.turns_during(lambda: answers.extend(manager.lookup_many(first, context))) == 0
            assert other.turns_during(manager.on_schedule_end) == 0
            assert manager.drain_jobs(60)
            if None not in answers:
                break
        assert True in answers
