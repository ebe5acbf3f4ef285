"""Counters count from any thread, and only declared names; a change of state is a notice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.faulty import FourMethodTier
from tests.support.obedient import obedient, put, stack_of
from tests.support.stacks import Register, manager_of
from tiered_kv.metrics.counters import Counters, count_of, flat_counts
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.notices import NOTICES_MAX, Notices
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import ManualClock
from tiered_kv.testing.rig import make_keys

STORES = Metric("stores_total", "Stores.")
FAILED = Metric("failed_blocks_total", "Blocks that failed.", ("direction", "reason"))


def test_no_event_is_lost_however_many_threads_count() -> None:
    counters = Counters([STORES])

    def count(_: int) -> None:
        for _ in range(2000):
            counters.add("stores_total")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    assert counters["stores_total"] == 16_000


def test_names_are_shown_from_the_start_and_labels_once_they_are_counted() -> None:
    counters = Counters([STORES, FAILED])
    assert counters.snapshot() == {"stores_total": 0, "failed_blocks_total": {}}
    counters.add("failed_blocks_total", "load", "absent", count=3)
    counters.add("failed_blocks_total", "load", "timeout")
    counters.add("failed_blocks_total", "store", "timeout", count=5)
    snapshot = counters.snapshot()
    failed = {"load": {"absent": 3, "timeout": 1}, "store": {"timeout": 5}}
    assert snapshot == {"stores_total": 0, "failed_blocks_total": failed}
    snapshot["failed_blocks_total"].clear()
    assert count_of(counters.snapshot(), "failed_blocks_total", "load", "absent") == 3, "a snapshot is the caller's"


def test_what_was_not_counted_is_0_and_what_has_labels_is_their_sum() -> None:
    counters = {
        "stores_total": 2,
        "failed_blocks_total": {"load": {"absent": 3, "timeout": 1}, "store": {"timeout": 5}},
    }
    assert count_of(counters, "stores_total") == 2
    assert count_of(counters, "failed_blocks_total") == 9
    assert count_of(counters, "failed_blocks_total", "load") == 4
    assert count_of(counters, "failed_blocks_total", "load", "checksum") == count_of(counters, "stores_total", "x") == 0
    assert dict(flat_counts(counters))["failed_blocks_total", "store", "timeout"] == 5


def test_gauges_among_the_metrics_are_not_counted() -> None:
    counters = Counters([STORES, Metric("used_bytes", "Bytes.")])
    assert counters.snapshot() == {"stores_total": 0}
    with pytest.raises(KeyError):
        counters.add("used_bytes")


def test_an_undeclared_name_is_an_error() -> None:
    counters = Counters([STORES, FAILED])
    for path in (("store",), ("stores_total", "slow"), ("failed_blocks_total",), ("failed_blocks_total", "load")):
        with pytest.raises(KeyError):
            counters.add(*path)
    with pytest.raises(KeyError):
        counters["failures_total"]


def notices_of(stack: Stack) -> dict[object, object]:
    """Return the count of each notice, the oldest first."""
    return {notice["what"]: notice["count"] for notice in manager_of(stack).notices.snapshot()}


def test_a_breaker_that_flips_takes_no_room_from_other_notices() -> None:
    clock = ManualClock()
    began_s = clock()
    notices = Notices(clock)
    notices.add("disk", "damaged blocks", 3)
    for _ in range(2 * NOTICES_MAX):
        clock.advance(2.0)
        notices.add("other", "breaker open")
        notices.add("other", "breaker half open")
    notices.add("disk", "damaged blocks", 2)
    found = [(notice["tier"], notice["what"], notice["count"]) for notice in notices.snapshot()]
    assert found == [
        ("other", "breaker open", 2 * NOTICES_MAX),
        ("other", "breaker half open", 2 * NOTICES_MAX),
        ("disk", "damaged blocks", 5),
    ]
    assert {notice["time"] for notice in notices.snapshot()} == {began_s + 4.0 * NOTICES_MAX}


def test_of_too_many_notices_the_latest_are_kept() -> None:
    notices = Notices(ManualClock())
    for number in range(2 * NOTICES_MAX):
        notices.add("disk", f"change {number}")
    notices.add("disk", f"change {NOTICES_MAX}")
    found = [notice["what"] for notice in notices.snapshot()]
    assert found == [f"change {number}" for number in (*range(NOTICES_MAX + 1, 2 * NOTICES_MAX), NOTICES_MAX)]


@pytest.mark.parametrize(
    ("failures_max", "failure", "notice"),
    [
        (1, {"store_reason": "timeout"}, {"breaker open": 1}),
        (1000, {"store_reason": "checksum"}, {"damaged blocks": 16}),
        (1000, {"store_error": RuntimeError("with the password")}, {"first exception, in submit_store": 1}),
    ],
)
def test_what_fails_is_one_notice_without_an_error_s_text(
    failures_max: int, failure: dict[str, object], notice: dict[str, int]
) -> None:
    entry = {"type": "obedient", "breaker_failures": failures_max, "breaker_cooldown": "1h"}
    with open_stack(stack_of(entry)) as stack:
        vars(obedient(stack)).update(failure)
        put(stack, make_keys(16))
        assert notices_of(stack) == notice


def test_a_tier_that_cannot_reset_is_a_notice(register: Register) -> None:
    class Nonblocking(FourMethodTier):
        is_nonblocking = True

    register("four", Nonblocking)
    with open_stack(stack_of({"type": "four"})) as stack:
        manager_of(stack).reset_cache()
        manager_of(stack).reset_cache()
        assert notices_of(stack) == {"disabled: it cannot reset": 1, "cache reset": 2}
        assert manager_of(stack).disabled_tiers() == {"four"}
