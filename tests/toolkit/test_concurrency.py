"""As many stores run at once as the storage needs."""

from __future__ import annotations

import pytest

from tiered_kv.testing.control import ManualClock
from tiered_kv.toolkit.concurrency import PAUSE_MAX, VERDICT_PARTS, StoreConcurrency

MAX = 7


def run(
    concurrency: StoreConcurrency, clock: ManualClock, limit_of_storage: int, steps: int, *, is_behind: bool = True
) -> list[int]:
    """In each step, store as many parts at once as the limit allows. Return the limits.

    The storage serves `limit_of_storage` parts at once.
    """
    limits = []
    for _ in range(steps):
        limit = concurrency.limit
        limits.append(limit)
        for _ in range(limit):
            concurrency.begin()
        clock.advance(1.0 * max(1.0, limit / limit_of_storage))
        for _ in range(limit):
            concurrency.end(16, is_behind=is_behind)
    return limits


@pytest.mark.parametrize(("limit_of_storage", "expected"), [(1, 1), (2, 2), (4, 4), (64, MAX)])
def test_it_finds_what_the_storage_needs(clock: ManualClock, limit_of_storage: int, expected: int) -> None:
    limits = run(StoreConcurrency(MAX, clock), clock, limit_of_storage, 100 * VERDICT_PARTS)
    assert limits.count(expected) > 0.8 * len(limits)


def test_trials_that_gain_nothing_become_rare(clock: ManualClock) -> None:
    concurrency = StoreConcurrency(MAX, clock)
    limits = run(concurrency, clock, 1, 3 * PAUSE_MAX * VERDICT_PARTS)
    assert 0 < limits[PAUSE_MAX * VERDICT_PARTS :].count(2) <= 3 * VERDICT_PARTS
    assert run(concurrency, clock, 64, 2 * PAUSE_MAX * VERDICT_PARTS)[-1] == MAX, "a storage that became faster"


def test_without_a_queue_one_part_at_a_time_suffices(clock: ManualClock) -> None:
    assert set(run(StoreConcurrency(MAX, clock), clock, 64, 100 * VERDICT_PARTS, is_behind=False)) == {1}


def test_a_limit_that_is_needed_no_more_is_left(clock: ManualClock) -> None:
    concurrency = StoreConcurrency(MAX, clock)
    assert run(concurrency, clock, 64, 20 * VERDICT_PARTS)[-1] == MAX
    run(concurrency, clock, 64, 1, is_behind=False)
    assert concurrency.limit == 1
