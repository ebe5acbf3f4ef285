"""Proofs judge rightly: a soak what grows, crashes only faults that happened."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest

from tests.support.crash_cases import FS, CaseOutcome, settle
from tests.support.crash_server import Case
from tests.support.figures import Figures
from tests.support.soak.holdings import Holdings, growth_problems, left_problems
from tests.support.soak.soak import pace_problems

MIB = 1 << 20
FULL_S, SHORT_S = 600.0, 60.0
Course = Callable[[float], float]


def series(seconds: float, what: str = "threads", course: Course = lambda s: 0.0) -> list[Holdings]:
    """Return samples as a soak has them: what is given, over a start that settles within two minutes, and noise."""
    chance = random.Random(7)
    samples = []
    for number in range(int(2 * seconds)):
        at_s = number / 2
        settling = min(1.0, at_s / 100)
        more = {name: course(at_s) if name == what else 0.0 for name in ("memory", "threads", "descriptors")}
        samples.append(
            Holdings(
                1000.0 + at_s,
                int((110 + 50 * settling + more["memory"] + 4 * chance.random()) * MIB),
                int(24 + 18 * settling + more["threads"] + chance.randrange(4)),
                int(40 + 20 * settling + more["descriptors"] + chance.randrange(20)),
            )
        )
    return samples


@pytest.mark.parametrize(
    ("seconds", "what", "course", "says"),
    [
        pytest.param(FULL_S, "memory", lambda s: 8 * s / 60, "bytes of memory", id="leak"),
        pytest.param(FULL_S, "memory", lambda s: 5 * (s // 30), "bytes of memory", id="leak in steps"),
        pytest.param(FULL_S, "threads", lambda s: s / 4, "threads", id="thread leak"),
        pytest.param(FULL_S, "descriptors", lambda s: s / 4, "descriptors", id="descriptor leak"),
        pytest.param(SHORT_S, "memory", lambda s: s * 300 * 16 / 1024, "bytes of memory", id="copies of blocks"),
        pytest.param(SHORT_S, "threads", lambda s: 5 * s, "threads", id="a thread a job"),
        pytest.param(SHORT_S, "descriptors", lambda s: 8 * s, "descriptors", id="a file a job"),
    ],
)
def test_what_grows_is_found(seconds: float, what: str, course: Course, says: str) -> None:
    assert any(says in problem for problem in growth_problems(series(seconds, what, course)))


@pytest.mark.parametrize(
    ("seconds", "course"),
    [
        (FULL_S, lambda s: 0.0),
        (SHORT_S, lambda s: s),  # too short to be told from settling
        (FULL_S, lambda s: 60.0 * (s % 50 < 8) + 20.0 * (s > 420)),  # buffers amid faults; one more arena
        (FULL_S, lambda s: min(s, 110) / 2),
        (0.0, lambda s: 0.0),
    ],
    ids=["noise", "short", "bursts and a step", "settling", "nothing"],
)
def test_what_does_not_grow_is_not_blamed(seconds: float, course: Course) -> None:
    assert growth_problems(series(seconds, "memory", course)) == []


def test_a_thread_that_stays_is_found() -> None:
    before, stop = Holdings.now(), threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(8)]  # more than an earlier test's that end meanwhile
    for thread in threads:
        thread.start()
    try:
        assert left_problems(before, Holdings.now, limit_s=0.0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert left_problems(before, Holdings.now) == []


@pytest.mark.parametrize(
    ("held_s", "says"),
    [
        # A twentieth of the time, in steps too few to be seen in the 99th percentile.
        ([1.0] * 30 + [0.004] * 50_000, "the scheduler waits for something"),
        ([0.3] * 100 + [0.004] * 50_000, "the scheduler waits for something"),
        ([0.22, *[0.004] * 49] * 20, "one step in a hundred"),
    ],
)
def test_a_scheduler_that_waits_is_found(held_s: list[float], says: str) -> None:
    (problem,) = pace_problems(held_s, FULL_S)
    assert says in problem


def test_a_scheduler_that_does_not_wait_passes_also_where_the_machine_stands_still_once() -> None:
    assert pace_problems([0.004] * 10_000, FULL_S) == pace_problems([], FULL_S) == []
    assert pace_problems([30.0, *[0.004] * 5000], SHORT_S) == []


# Cases of crashes count only if their fault happened.


def outcomes(hits: Sequence[bool], problems: Sequence[str] = ()) -> list[CaseOutcome]:
    return [CaseOutcome(Case(FS), was_hit, 1, 1, problems) for was_hit in hits]


def test_only_cases_whose_fault_happened_count() -> None:
    figures = Figures()
    assert len(settle("crash/fs", outcomes([True, True, False]), figures)) == 2
    assert "| `crash/fs` | phantoms | 2 | 2 | system calls killed at; faults not made: 1 |" in figures.lines()


def test_a_proof_fails_that_broke_a_promise_or_reached_a_third_of_its_points() -> None:
    with pytest.raises(AssertionError, match="1 of 1 cases"):
        settle("crash/fs", outcomes([True], ["wrong bytes"]), Figures())
    with pytest.raises(AssertionError, match="only 2 of 6"):
        settle("crash/fs", outcomes([True] * 2 + [False] * 4), Figures())
