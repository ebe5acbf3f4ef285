"""What a soak judges is found in made-up series, and their noise is not."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.soak.holdings import Holdings, growth_problems, left_problems, rise_problems, slope_per_s
from tests.support.soak.limits import REQUESTS_MAX, LimitsWatch
from tests.support.soak.pace import Pace
from tests.support.soak.run_queue import RunQueue
from tiered_kv.base import ReqContext, make_offload_key
from tiered_kv.stack import Stack, open_stack
from tiered_kv.tiering.base import JobMetadata
from tiered_kv.toolkit.queued import QueuedTier

MIB = 1 << 20
FULL_S, SHORT_S = 600.0, 60.0


def series(
    seconds: float,
    memory: Callable[[float], float] = lambda s: 0.0,
    threads: Callable[[float], float] = lambda s: 0.0,
    descriptors: Callable[[float], float] = lambda s: 0.0,
) -> list[Holdings]:
    """Return samples as a soak has them: what is given, over a start that settles within two minutes, and noise."""
    chance = random.Random(7)
    samples = []
    for number in range(int(2 * seconds)):
        at_s = number / 2
        settling = min(1.0, at_s / 100)
        samples.append(
            Holdings(
                1000.0 + at_s,
                int((110 + 50 * settling + memory(at_s) + 4 * chance.random()) * MIB),
                int(24 + 18 * settling + threads(at_s) + chance.randrange(4)),
                int(40 + 20 * settling + descriptors(at_s) + chance.randrange(20)),
            )
        )
    return samples


class TestGrowth:
    @pytest.mark.parametrize("mib_per_minute", [6, 20])
    def test_a_leak_of_memory_is_found(self, mib_per_minute: float) -> None:
        (problem,) = growth_problems(series(FULL_S, memory=lambda s: mib_per_minute * s / 60), "first")
        assert f"{mib_per_minute}.0 MiB a minute" in problem

    def test_a_leak_in_steps_is_found(self) -> None:
        assert growth_problems(series(FULL_S, memory=lambda s: 10 * (s // 30)), "first")

    def test_noise_is_none(self) -> None:
        assert growth_problems(series(FULL_S), "first") == []

    def test_bursts_and_one_step_are_none(self) -> None:
        """A fault fills buffers for seconds; an allocator takes another arena, once."""

        def memory(at_s: float) -> float:
            return 60.0 * (at_s % 50 < 8) + 20.0 * (at_s > 420)

        assert growth_problems(series(FULL_S, memory=memory), "first") == []

    def test_settling_is_none(self) -> None:
        assert growth_problems(series(FULL_S, memory=lambda s: min(s, 110) * 3), "first") == []

    def test_what_is_too_short_to_tell_is_not_judged(self) -> None:
        assert growth_problems(series(SHORT_S, memory=lambda s: s), "first") == []
        assert growth_problems([], "first") == []

    @pytest.mark.parametrize("what", ["threads", "descriptors"])
    def test_a_leak_of_handles_is_found(self, what: str) -> None:
        def leak(at_s: float) -> float:
            return at_s / 4

        samples = series(FULL_S, threads=leak) if what == "threads" else series(FULL_S, descriptors=leak)
        (problem,) = growth_problems(samples, "second")
        assert problem.startswith(f"{what} of the second process grew")

    def test_the_slope_is_that_of_a_line(self) -> None:
        assert slope_per_s([0, 1, 2, 3], [5, 8, 11, 14]) == pytest.approx(3)
        assert slope_per_s([0, 0], [1, 2]) == 0
        assert slope_per_s([], []) == 0


class TestRise:
    """Also in a minute."""

    def test_a_copy_of_each_block_is_found(self) -> None:
        blocks_per_s = 300
        (problem,) = rise_problems(series(SHORT_S, memory=lambda s: s * blocks_per_s * 16 / 1024), "first")
        assert "bytes of memory" in problem

    def test_a_handle_to_each_job_is_found(self) -> None:
        problems = rise_problems(series(SHORT_S, threads=lambda s: 5 * s, descriptors=lambda s: 8 * s), "second")
        assert ["threads" in problems[0], "descriptors" in problems[1]] == [True, True]

    def test_settling_and_noise_are_none(self) -> None:
        assert rise_problems(series(SHORT_S), "first") == rise_problems(series(FULL_S), "first") == []
        assert rise_problems([], "first") == []


class TestWhatIsLeft:
    def test_a_thread_that_stays_is_found(self) -> None:
        before, stop = Holdings.now(), threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        try:
            assert left_problems(before, Holdings.now, limit_s=0.0)
        finally:
            stop.set()
            thread.join()
        assert left_problems(before, Holdings.now) == []


class TestPace:
    def test_a_scheduler_that_does_not_wait_passes(self) -> None:
        """Although every second step stands in the run queue for long."""
        pace = Pace()
        for number in range(10_000):
            queued_s = 0.5 * (number % 2)
            pace.add_step(0.004 + queued_s, queued_s)
        assert pace.problems(FULL_S) == []

    @pytest.mark.parametrize("wait_s", [1.0, 0.3])
    def test_one_that_waits_for_frozen_servers_is_found(self, wait_s: float) -> None:
        """A twentieth of the time, as in a soak; in such steps too few to be seen in the 99th percentile."""
        pace = Pace()
        for _ in range(int(0.05 * FULL_S / wait_s)):
            pace.add_step(wait_s, 0.0)
        for _ in range(50_000):
            pace.add_step(0.004, 0.0)
        (problem,) = pace.problems(FULL_S)
        assert "the scheduler waits for something" in problem

    def test_one_that_waits_for_each_answer_is_found(self) -> None:
        pace = Pace()
        for number in range(1000):
            pace.add_step(0.12 if number % 50 == 0 else 0.004, 0.0)
        (problem,) = pace.problems(FULL_S)
        assert "one step in a hundred" in problem

    def test_a_machine_that_stands_still_once_is_none(self) -> None:
        pace = Pace()
        pace.add_step(30.0, 0.0)
        for _ in range(5000):
            pace.add_step(0.004, 0.0)
        assert pace.problems(SHORT_S) == []

    def test_more_work_under_load_is_found(self) -> None:
        pace = Pace()
        for _ in range(100):
            pace.idle_cpu.add(200e-6)
            pace.busy_cpu.add(500e-6)
        assert pace.problems(FULL_S) == []
        for _ in range(200):
            pace.busy_cpu.add(900e-6)
        (problem,) = pace.problems(FULL_S)
        assert "4.5 times the processor time" in problem

    def test_the_run_queue_is_told_by_the_kernel(self) -> None:
        queue = RunQueue()
        first = queue.waited_s()
        assert 0 <= first <= queue.waited_s()
        queue.close()
        queue.close()
        assert queue.waited_s() == 0


@pytest.fixture
def stack() -> Iterator[Stack]:
    config = {
        "namespace": {"model": "m"},
        "block": {"bytes": 512, "tokens": 16},
        "primary": {"capacity": 64 * 512},
        "secondary": [{"type": "memory", "capacity": "1MiB"}],
    }
    with open_stack(config) as opened:
        yield opened


class TestQueues:
    """Of a tier, which the manager's own budgets do not show."""

    def tier(self, stack: Stack) -> QueuedTier:
        (guarded,) = stack.manager._tiers
        assert isinstance(guarded.tier, QueuedTier)
        return guarded.tier

    def test_what_is_within_its_limits_passes(self, stack: Stack) -> None:
        keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(16)]
        stack.put(keys, np.zeros((16, 512), dtype=np.uint8))
        watch = LimitsWatch(stack.manager)
        watch.note_time()
        assert list(watch.problems()) == []
        assert watch.held_up_s_max >= 0

    def test_jobs_that_only_the_tier_knows_are_found(self, stack: Stack) -> None:
        tier, rows = self.tier(stack), np.arange(40, dtype=np.int64)
        keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(40)]
        tier.submit_store(JobMetadata(7, keys, rows, False, ReqContext("r"), deadline=math.inf))
        problems = list(LimitsWatch(stack.manager).problems())
        assert problems == [
            "tier memory keeps 1 jobs, the manager knows of 0",
            "tier memory has jobs of 40 blocks in its queue, 32 allowed",
        ]
        assert stack.manager.drain_jobs(30)
        list(tier.get_finished())

    def test_deadlines_that_are_kept_are_found(self, stack: Stack) -> None:
        self.tier(stack)._job_deadlines.extend((math.inf, number) for number in range(200))
        assert list(LimitsWatch(stack.manager).problems()) == ["tier memory keeps 200 deadlines of jobs"]

    def test_requests_that_the_tier_does_not_forget_are_found(self, stack: Stack) -> None:
        lookups = self.tier(stack)._batched_lookups
        for number in range(REQUESTS_MAX + 1):
            lookups.lookup_many([make_offload_key(bytes(32), 0)], ReqContext(f"r{number}"))
        assert list(LimitsWatch(stack.manager).problems()) == [
            f"tier memory keeps the answers of {REQUESTS_MAX + 1} requests"
        ]
