"""Work of tiers in the background: each block of a job is handed out once, and no background task is lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.threads import no_threads
from tiered_kv.base import ReqContext, make_offload_key
from tiered_kv.reasons import Reason
from tiered_kv.system.threads import BackgroundTask, _log
from tiered_kv.testing.control import ManualClock
from tiered_kv.tiering.base import JobMetadata
from tiered_kv.toolkit.concurrency import STALL_S, StoreConcurrency
from tiered_kv.toolkit.jobs import LOADS_A_STORE, PATIENCE_S, Job, Outcome, PartQueue


def job_of(blocks: int, is_load: bool = True, part_blocks: int = 3, job_id: int = 1) -> Job:
    keys = [make_offload_key(bytes(divmod(job_id, 256)) + number.to_bytes(4, "big"), 0) for number in range(blocks)]
    return Job(JobMetadata(job_id, keys, np.arange(blocks), is_load, ReqContext()), 0, part_blocks, 0.0)


def test_a_result_names_what_succeeded_in_order() -> None:
    job = job_of(9)
    queue = PartQueue(lambda: None, StoreConcurrency(1, time.monotonic))
    queue.put(job)
    parts = [queue.take(), queue.take(), queue.take()]
    for part in reversed(parts):
        assert part is not None
        if part.start:
            job.failed_parts.append((part, Outcome([job.keys[part.start]], f"from {part.start}")))
        queue.end(part)
    result = job.result()
    assert result.successful_keys == [*job.keys[:3], job.keys[3], job.keys[6]]
    assert result.reason == "from 3"


def test_a_load_wakes_a_worker_for_a_store_that_waits_behind_one_that_hangs() -> None:
    clock, woken = ManualClock(), list[str]()
    queue = PartQueue(lambda: woken.append("worker"), StoreConcurrency(3, clock))
    queue.put(job_of(1, is_load=False, job_id=1))
    assert queue.take() is not None
    queue.begin_stores()  # and hangs
    queue.put(job_of(1, is_load=False, job_id=2))
    clock.advance(2 * STALL_S)
    woken.clear()
    queue.put(job_of(1, job_id=3))
    taken: list[int] = []
    while woken:
        woken.pop()
        part = queue.take()
        assert part is not None
        taken.append(part.job.metadata.job_id)
    assert taken == [3, 2]


def test_no_worker_is_woken_for_a_store_that_may_not_begin() -> None:
    woken: list[str] = []
    queue = PartQueue(lambda: woken.append("worker"), StoreConcurrency(1, time.monotonic))
    for number in range(3):
        queue.put(job_of(6, is_load=False, job_id=number))
    woken.clear()
    part = queue.take()
    queue.put(job_of(1, is_load=False, job_id=3))
    assert part is not None
    assert woken == []
    queue.end(part)
    assert woken == ["worker"], "another may begin now"
    queue.put(job_of(1, job_id=4))
    assert len(woken) == 2


def test_a_burst_of_loads_goes_first_and_loads_that_never_end_leave_stores_a_share() -> None:
    clock = ManualClock()
    queue = PartQueue(lambda: None, StoreConcurrency(1, clock))
    for number in range(10):
        queue.put(job_of(6, is_load=False, part_blocks=6, job_id=number))
    kinds = []
    for number in range(100):
        queue.put(job_of(6, job_id=10 + number))  # of two parts, so that loads always wait
        part = queue.take()
        assert part is not None
        queue.end(part)
        kinds.append("load" if part.job.metadata.is_promotion else "store")
        clock.advance(PATIENCE_S / 20)
    first = kinds.index("store")
    assert first in (20, 21), "a burst of loads goes first"
    apart = LOADS_A_STORE * 6 // 3 + 1
    assert [number for number, kind in enumerate(kinds) if kind == "store"] == list(range(first, 100, apart))


def test_slow_stores_beside_loads_that_never_end_run_side_by_side_and_leave_a_worker_to_loads() -> None:
    clock = ManualClock()
    queue = PartQueue(lambda: None, StoreConcurrency(3, clock))
    for number in range(6):
        queue.put(job_of(3, is_load=False, job_id=number))
    stores_running = []
    for number in range(60):
        queue.put(job_of(6, job_id=10 + number))  # of two parts, so that loads always wait
        part = queue.take()
        assert part is not None
        if part.job.metadata.is_promotion:
            queue.end(part)
        else:
            stores_running.append(number)
        clock.advance(PATIENCE_S / 10)
    assert len(stores_running) == 3
    assert set(np.diff(stores_running)) == {LOADS_A_STORE + 1}


@given(
    st.lists(
        st.tuples(st.sampled_from(["load", "store", "take", "take", "take", "take", "wait"]), st.integers(1, 60)),
        min_size=60,
        max_size=120,
    )
)
def test_whatever_the_mix_the_first_load_and_the_first_store_begin_soon(steps: list[tuple[str, int]]) -> None:
    clock = ManualClock()
    queue = PartQueue(lambda: None, StoreConcurrency(10**6, clock, begins_at=10**6))
    waiting = {True: 0, False: 0}  # blocks, by whether they are loaded
    passed = {True: 0, False: 0}  # blocks of the other kind that began since one of this kind began, or could begin
    patient_until_s = None
    for job_id, (step, number) in enumerate(steps):
        if step == "wait":
            clock.advance(number * PATIENCE_S / 20)
        elif step != "take":
            is_load = step == "load"
            queue.put(job_of(number, is_load, 3 if is_load else 6, job_id))
            passed[is_load] = 0 if not waiting[is_load] else passed[is_load]
            waiting[is_load] += number
        else:
            if patient_until_s is None and waiting[False]:
                patient_until_s = clock() + PATIENCE_S
            part = queue.take()
            assert (part is None) == (not any(waiting.values()))
            if part is None:
                continue
            is_load = part.job.metadata.is_promotion
            waiting[is_load] -= part.stop - part.start
            passed[is_load] = 0
            if is_load and patient_until_s is not None and clock() >= patient_until_s:
                passed[False] += part.stop - part.start
            elif not is_load:
                passed[True] += part.stop - part.start
                patient_until_s = None
            assert passed[False] < LOADS_A_STORE * 6 + 3 or not waiting[False], "a store starves"
            assert passed[True] <= 6 or not waiting[True], "a load starves"


@pytest.mark.parametrize("seed", range(3))
def test_every_block_is_served_or_dropped_once_by_concurrent_workers(seed: int) -> None:
    choice = random.Random(seed)
    tokens = threading.Semaphore(0)
    queue = PartQueue(tokens.release, StoreConcurrency(2, time.monotonic, begins_at=2))
    served: list[tuple[int, int]] = []
    ended: list[int] = []
    stop = threading.Event()

    def work() -> None:
        while True:
            tokens.acquire()
            if stop.is_set():
                return
            first = queue.take()
            for part in [] if first is None else [first, *queue.take_small_jobs(first)]:
                served.extend((part.job.metadata.job_id, block) for block in range(part.start, part.stop))
                if queue.end(part):
                    ended.append(part.job.metadata.job_id)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    jobs = [job_of(choice.randint(1, 12), choice.choice((True, False)), choice.randint(1, 4), n) for n in range(400)]
    try:
        for number, job in enumerate(jobs):
            queue.put(job)
            if choice.random() < 0.3:
                victim = jobs[choice.randint(max(0, number - 5), number)]
                if queue.drop_rest(victim, Reason.EXPIRED):
                    ended.append(victim.metadata.job_id)
        for job in queue.drop_all(Reason.SHUTDOWN):
            ended.append(job.metadata.job_id)
    finally:
        stop.set()
        tokens.release(len(workers))
        for worker in workers:
            worker.join()
    assert sorted(ended) == list(range(400))
    assert len(served) == len(set(served))
    assert sorted(served) == [(job.metadata.job_id, block) for job in jobs for block in range(job.end_block)]


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
    before = list(_log.handlers)
    yield _log.addHandler
    _log.handlers[:] = before


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
