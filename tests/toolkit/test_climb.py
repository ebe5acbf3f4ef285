"""As many parts of stores run at once as the storage needs."""

from __future__ import annotations

import pytest

from tiered_kv.testing.control import ManualClock
from tiered_kv.toolkit.climb import PAUSE_MAX, VERDICT_PARTS, Climb

MAX = 7


def run(climb: Climb, clock: ManualClock, limit_of_storage: int, rounds: int, *, is_behind: bool = True) -> list[int]:
    """Store rounds of `climb.limit` parts at once, on a storage that serves so many at once; return the limits."""
    limits = []
    for _ in range(rounds):
        limit = climb.limit
        limits.append(limit)
        for _ in range(limit):
            climb.begin()
        clock.advance(1.0 * max(1.0, limit / limit_of_storage))
        for _ in range(limit):
            climb.end(16, is_behind=is_behind)
    return limits


@pytest.mark.parametrize(("limit_of_storage", "expected"), [(1, 1), (2, 2), (4, 4), (64, MAX)])
def test_it_finds_what_the_storage_needs(clock: ManualClock, limit_of_storage: int, expected: int) -> None:
    limits = run(Climb(MAX, clock), clock, limit_of_storage, 100 * VERDICT_PARTS)
    assert limits.count(expected) > 0.8 * len(limits)


def test_trials_that_gain_nothing_become_rare(clock: ManualClock) -> None:
    climb = Climb(MAX, clock)
    limits = run(climb, clock, 1, 3 * PAUSE_MAX * VERDICT_PARTS)
    assert 0 < limits[PAUSE_MAX * VERDICT_PARTS :].count(2) <= 3 * VERDICT_PARTS
    assert run(climb, clock, 64, 2 * PAUSE_MAX * VERDICT_PARTS)[-1] == MAX, "a storage that became faster"


def test_without_a_queue_one_part_at_a_time_suffices(clock: ManualClock) -> None:
    assert set(run(Climb(MAX, clock), clock, 64, 100 * VERDICT_PARTS, is_behind=False)) == {1}


def test_a_limit_that_is_needed_no_more_is_left(clock: ManualClock) -> None:
    climb = Climb(MAX, clock)
    assert run(climb, clock, 64, 20 * VERDICT_PARTS)[-1] == MAX
    run(climb, clock, 64, 1, is_behind=False)
    assert climb.limit == 1
