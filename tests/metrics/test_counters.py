"""Counters count from any thread, and only declared names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered_kv.metrics.counters import Counters, count_of, flat_counts


def test_no_event_is_lost_however_many_threads_count() -> None:
    counters = Counters(("stores_total",))

    def count(_: int) -> None:
        for _ in range(2000):
            counters.add("stores_total")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    assert counters["stores_total"] == 16_000


def test_names_are_shown_from_the_start_and_labels_once_they_are_counted() -> None:
    counters = Counters(("stores_total",), ("failed_blocks_total",))
    assert counters.snapshot() == {"stores_total": 0}
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


def test_an_undeclared_name_is_an_error() -> None:
    counters = Counters(("stores_total",), ("failed_blocks_total",))
    for path in (("store",), ("stores_total", "slow"), ("failed_blocks_total",)):
        with pytest.raises(KeyError):
            counters.add(*path)
    with pytest.raises(KeyError):
        counters["failures_total"]
