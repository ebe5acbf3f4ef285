"""Counters count from any thread, and know what they count."""

from __future__ import annotations

import threading

import pytest

from tiered_kv.toolkit.counters import Counters


def test_no_event_is_lost_however_many_threads_count() -> None:
    counters = Counters(("stores",))

    def count() -> None:
        for _ in range(2000):
            counters.add("stores")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters["stores"] == 16_000


def test_names_are_shown_from_the_start_and_those_of_families_once_they_are_counted() -> None:
    counters = Counters(("stores", "loads"), families=("failed_",))
    assert counters["failed_timeout"] == 0
    assert counters.snapshot() == {"stores": 0, "loads": 0}
    counters.add("failed_timeout", 3)
    assert counters.snapshot() == {"stores": 0, "loads": 0, "failed_timeout": 3}


def test_a_name_that_nobody_has_declared_is_a_mistake() -> None:
    counters = Counters(("stores",), families=("failed_",))
    with pytest.raises(KeyError):
        counters.add("store")
    with pytest.raises(KeyError):
        counters["failures"]
