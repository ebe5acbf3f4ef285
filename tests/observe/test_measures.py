"""Histograms, notices and the measures of a manager: what they count, and that they cost nothing between samples."""

from __future__ import annotations

import time

import pytest

from tests.observe.rig import Engine
from tests.performance.bench import InstantTier, block_key
from tiered_kv.counters import LABELS_MAX, OTHER, Counters, flat_counts
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.observe.histogram import INFINITY, Histogram, quantile
from tiered_kv.observe.notices import NOTICES_MAX, Notices
from tiered_kv.observe.step_timer import EVERY_STEPS, StepTimer
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.manager import TieringOffloadingManager


def test_a_value_is_counted_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 5.0, 5.1, 80.0):
        histogram.add(value)
    told = histogram.snapshot()
    assert told["buckets"] == {"1.0": 2, "2.0": 1, "5.0": 1, INFINITY: 2}
    assert told["count"] == 6
    assert told["sum"] == pytest.approx(92.6)


def test_a_quantile_lies_in_the_bucket_of_its_value() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    assert quantile(histogram.snapshot(), 0.5) is None
    for value in (1.5,) * 98 + (3.0, 100.0):
        histogram.add(value)
    told = histogram.snapshot()
    median, high = quantile(told, 0.5), quantile(told, 0.99)
    assert median is not None
    assert 1.0 < median <= 2.0
    assert high is not None
    assert 2.0 < high <= 5.0
    assert quantile(told, 1.0) == 5.0, "no more is known of the last bucket"


def test_histograms_are_no_counts() -> None:
    histogram = Histogram((1.0,))
    histogram.add(0.5)
    assert dict(flat_counts({"jobs_total": 2, "job_seconds": {"store": histogram.snapshot()}})) == {("jobs_total",): 2}


def test_labels_from_elsewhere_are_bounded() -> None:
    counters = Counters((), ("failed_blocks_total",))
    for number in range(10 * LABELS_MAX):
        counters.add("failed_blocks_total", "load", f"reason-{number}")
    failed = counters.snapshot()["failed_blocks_total"]["load"]
    assert len(failed) == LABELS_MAX + 1
    assert failed[OTHER] == 9 * LABELS_MAX


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
    told = [(notice["tier"], notice["what"], notice["count"]) for notice in notices.snapshot()]
    assert told == [
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
    told = [notice["what"] for notice in notices.snapshot()]
    assert told == [f"change {number}" for number in (*range(NOTICES_MAX + 1, 2 * NOTICES_MAX), NOTICES_MAX)]


class Calls:
    """An object whose methods are called in steps."""

    def __init__(self) -> None:
        self.timer = StepTimer(self, time.monotonic)

    def lookup(self) -> bool:
        return True

    def on_schedule_end(self) -> None:
        self.lookup()
        self.timer.count_step()

    def __getattr__(self, name: str) -> object:
        return lambda: None


def test_one_step_of_several_is_timed_and_the_others_run_as_they_are() -> None:
    calls = Calls()
    timed = []
    for step in range(3 * EVERY_STEPS):
        calls.lookup()
        if "lookup" in vars(calls):
            timed.append(step)
        calls.on_schedule_end()
    assert timed == [EVERY_STEPS, 2 * EVERY_STEPS]
    assert calls.timer.seconds.snapshot()["count"] == 2


def test_a_wrapper_that_was_replaced_meanwhile_is_left_alone() -> None:
    calls = Calls()
    for _ in range(EVERY_STEPS):
        calls.on_schedule_end()
    replaced = vars(calls)["lookup"] = lambda: False
    calls.on_schedule_end()
    assert vars(calls)["lookup"] is replaced
    assert "on_schedule_end" not in vars(calls)


def test_restored_tokens_are_those_of_the_group_that_loads_most() -> None:
    primary = CPUOffloadingManager(CPUBackend(PrimaryRegion(16, 4096)), "lru")
    engine = Engine(TieringOffloadingManager(primary, [], block_tokens=16))
    keys = [*make_keys(8), *make_keys(3, group_idx=1)]
    context = engine.begin("request")
    engine.write(keys, context)
    engine.load(keys, context)
    told = engine.manager.counters()["cpu"]
    assert (told["loaded_blocks_total"], told["restored_tokens_total"]) == (11, 8 * 16)
    engine.manager.shutdown()


def test_a_manager_measures_its_steps_jobs_and_lookups() -> None:
    region = PrimaryRegion(64, 4096)
    primary = CPUOffloadingManager(CPUBackend(region), "lru")
    engine = Engine(TieringOffloadingManager(primary, [InstantTier(region.kv_view)], block_tokens=16))
    for number in range(2 * EVERY_STEPS + 1):
        stored, context = [block_key(number)], engine.begin(f"request-{number}")
        engine.write(stored, context)
        assert engine.look_up([*stored, block_key(10**6 + number)], context) == 1
        engine.load(stored, context)
        engine.end(context)
    told = engine.manager.counters()
    (name,) = told.keys() - {"cpu"}
    assert told["cpu"]["step_seconds"]["count"] == 2
    assert 0 < told["cpu"]["step_seconds"]["sum"] < 60
    assert told["cpu"]["restored_tokens_total"] == 16 * told["cpu"]["loaded_blocks_total"] > 0
    assert told[name]["job_seconds"]["store"]["count"] == told[name]["submitted_jobs_total"]["store"]
    assert told[name]["job_bytes"]["store"]["sum"] == 4096 * (2 * EVERY_STEPS + 1)
    assert told[name]["store_budget_bytes"] == told[name]["load_budget_bytes"] == 16 * 4096
    engine.manager.shutdown()
