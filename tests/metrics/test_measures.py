"""Histograms, the measures of managers and tiers, and the one vocabulary of both."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.performance.bench import InstantTier, block_key
from tests.support.obedient import BLOCK_BYTES, Engine, get, put, stack_of
from tests.support.pages import tier_metrics, undescribed
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import LABELS_MAX, OTHER, Counters, flat_counts
from tiered_kv.metrics.histogram import INFINITY, Histogram, checked_histogram, quantile
from tiered_kv.metrics.metric import TOTAL, Metric
from tiered_kv.metrics.step_timer import EVERY_STEPS, StepTimer, timed
from tiered_kv.metrics.vocabulary import MANAGER, common_metrics
from tiered_kv.reasons import FAILED, SKIPPED, Fate, RecordStatus, TooSlow
from tiered_kv.stack.exporters.metrics import NAME_SERIES_MAX
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.manager import TieringOffloadingManager


def test_a_value_is_counted_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 5.0, 5.1, 80.0):
        histogram.add(value)
    snapshot = histogram.snapshot()
    assert snapshot["buckets"] == {"1.0": 2, "2.0": 1, "5.0": 1, INFINITY: 2}
    assert snapshot["count"] == 6
    assert snapshot["sum"] == pytest.approx(92.6)


def test_a_quantile_lies_in_the_bucket_of_its_value() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    assert quantile(histogram.snapshot(), 0.5) is None
    for value in (1.5,) * 98 + (3.0, 100.0):
        histogram.add(value)
    snapshot = histogram.snapshot()
    median, high = quantile(snapshot, 0.5), quantile(snapshot, 0.99)
    assert median is not None
    assert 1.0 < median <= 2.0
    assert high is not None
    assert 2.0 < high <= 5.0
    assert quantile(snapshot, 1.0) == 5.0, "no more is known of the last bucket"


def test_histograms_are_no_counts() -> None:
    histogram = Histogram((1.0,))
    histogram.add(0.5)
    assert dict(flat_counts({"jobs_total": 2, "job_seconds": {"store": histogram.snapshot()}})) == {("jobs_total",): 2}


def test_labels_from_elsewhere_are_bounded() -> None:
    counters = Counters([Metric("failed_blocks_total", "Blocks.", ("direction", "reason"))])
    for number in range(10 * LABELS_MAX):
        counters.add("failed_blocks_total", "load", f"reason-{number}")
    failed = counters.snapshot()["failed_blocks_total"]["load"]
    assert len(failed) == LABELS_MAX + 1
    assert failed[OTHER] == 9 * LABELS_MAX


def test_every_label_from_elsewhere_is_bounded() -> None:
    counters = Counters([Metric("moved_bytes_total", "Bytes.", ("way", "kind"))])
    for number in range(10 * LABELS_MAX):
        counters.add("moved_bytes_total", f"way-{number}", "a kind")
    (family,) = counters.families()
    assert len(family.values) == NAME_SERIES_MAX, "the exporters leave out no count"
    assert sum(family.values.values()) == 10 * LABELS_MAX  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"labels": ([],)}, {"bounds": (True,)}, {"bounds": (10**400,)}, {"bounds": (1, 10**400)}]
)
def test_a_metric_of_any_wrong_type_is_a_config_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the metric 'open_seconds' (needs|cannot have)"):
        Metric("open_seconds", "Seconds.", **wrong)


def test_an_unknown_common_metric_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no common metric is 'blokcs'; .*blocks"):
        common_metrics("blocks", "blokcs")


@pytest.mark.parametrize("total", [math.nan, math.inf])
def test_a_histogram_s_sum_is_a_number_that_json_has(total: float) -> None:
    histogram = Histogram((1.0,))
    histogram.add(total)
    assert checked_histogram(histogram.snapshot(), (1.0,)) is None


class Calls:
    """An object whose methods are called in steps, each for some seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_timer = StepTimer(lambda: self.now_s)

    def lookup(self) -> None:
        self.now_s += 1

    @timed
    def touch(self) -> None:
        self.now_s += 2

    @timed
    def complete_load(self) -> None:
        self.touch()
        self.now_s += 4

    def on_schedule_end(self) -> None:
        began_s = self.now_s
        self.now_s += 8
        self.step_timer.end_step(began_s)


def test_the_calls_of_one_step_of_several_are_timed_once_each_without_lookups_of_one_key() -> None:
    calls = Calls()
    for _ in range(3 * EVERY_STEPS):
        calls.lookup()
        calls.touch()
        calls.complete_load()
        calls.on_schedule_end()
    assert {name: calls.step_timer.seconds.snapshot()[name] for name in ("count", "sum")} == {"count": 2, "sum": 32.0}


def test_jobs_that_an_engine_collects_before_its_lookups_count_in_the_time_of_its_step() -> None:
    now_s = 0.0

    class SlowTier(InstantTier):
        def get_finished(self) -> Iterable[JobResult]:
            nonlocal now_s
            now_s += 1
            return super().get_finished()

    region = PrimaryRegion(16, 4096)
    primary = PrimaryRows(CPUBackend(region), "lru")
    manager = TieringOffloadingManager(primary, [SlowTier(region.kv_view)], block_tokens=16, clock=lambda: now_s)
    for _ in range(EVERY_STEPS + 1):
        manager.poll()
        manager.on_schedule_end()
    seconds = manager.counters()["cpu"]["step_seconds"]
    assert (seconds["count"], seconds["sum"]) == (1, 2.0)
    manager.shutdown()


def test_restored_tokens_are_those_of_the_group_that_loads_most() -> None:
    primary = PrimaryRows(CPUBackend(PrimaryRegion(16, 4096)), "lru")
    engine = Engine(TieringOffloadingManager(primary, [], block_tokens=16))
    keys = [*make_keys(8), *make_keys(3, group_idx=1)]
    context = engine.begin("request")
    engine.write(keys, context)
    engine.load(keys, context)
    snapshot = engine.manager.counters()["cpu"]
    assert (snapshot["loaded_blocks_total"], snapshot["restored_tokens_total"]) == (11, 8 * 16)
    engine.manager.shutdown()


def test_a_manager_measures_its_steps_jobs_and_lookups() -> None:
    region = PrimaryRegion(64, 4096)
    primary = PrimaryRows(CPUBackend(region), "lru")
    engine = Engine(TieringOffloadingManager(primary, [InstantTier(region.kv_view)], block_tokens=16))
    for number in range(2 * EVERY_STEPS + 1):
        stored, context = [block_key(number)], engine.begin(f"request-{number}")
        engine.write(stored, context)
        assert engine.look_up([*stored, block_key(10**6 + number)], context) == 1
        engine.load(stored, context)
        engine.end(context)
    snapshot = engine.manager.counters()
    (name,) = snapshot.keys() - {"cpu"}
    assert snapshot["cpu"]["step_seconds"]["count"] == 2
    assert 0 < snapshot["cpu"]["step_seconds"]["sum"] < 60
    assert snapshot["cpu"]["restored_tokens_total"] == 16 * snapshot["cpu"]["loaded_blocks_total"] > 0
    assert snapshot[name]["job_seconds"]["store"]["count"] == snapshot[name]["submitted_jobs_total"]["store"]
    assert snapshot[name]["job_bytes"]["store"]["sum"] == 4096 * (2 * EVERY_STEPS + 1)
    assert snapshot[name]["store_budget_bytes"] == snapshot[name]["load_budget_bytes"] == 16 * 4096
    engine.manager.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("tier_type", ["memory", "nvme"])
def test_bytes_that_are_evicted_without_a_read_are_wasted(tier_type: str, tmp_path: Path) -> None:
    place = {"path": str(tmp_path / "kv")} if tier_type == "nvme" else {}
    with open_stack(stack_of({"type": tier_type, "capacity": "1MiB", **place})) as stack:
        put(stack, make_keys(600))
        own = stack.counters()[tier_type]["tier"]
        assert own["evicted_blocks_total"] > 0
        assert own["wasted_bytes_total"] // own["evicted_blocks_total"] in range(BLOCK_BYTES, BLOCK_BYTES + 256)
        for number in range(20):
            keys = make_keys(32, f"batch-{number}")
            put(stack, keys)
            assert get(stack, keys) == 32  # 16 and more of them from the tier
        now = stack.counters()[tier_type]["tier"]
        evicted_bytes = (now["evicted_blocks_total"] - own["evicted_blocks_total"]) * BLOCK_BYTES
        wasted_bytes = now["wasted_bytes_total"] - own["wasted_bytes_total"]
        assert 0 < wasted_bytes <= 0.95 * evicted_bytes, "of half of them, and of moved ones, nothing was read"


TIER = {name: metric for name, (metric, _) in tier_metrics().items()}


@pytest.mark.parametrize("table", [MANAGER, TIER], ids=["manager", "tiers"])
def test_no_two_names_are_one_metric_to_prometheus(table: dict[str, Metric]) -> None:
    names = [name.removesuffix(TOTAL) for name in table]
    assert len(set(names)) == len(names)
    endings = ("_bucket", "_count", "_sum", "_created", "_info")
    assert [name for name in names if name.endswith(endings) or name == "dropped_series"] == []


def test_every_metric_says_what_it_is() -> None:
    for name, metric in {**MANAGER, **TIER}.items():
        assert metric.help.endswith("."), name
        assert "tier" not in metric.labels


def test_the_pages_explain_every_reason() -> None:
    of_records = {status.value for status in RecordStatus}
    of_misses = {fate.label for fate in Fate if fate > Fate.STORED}
    words = {*SKIPPED, *TooSlow, *FAILED, *of_misses} - of_records
    assert undescribed(words, "reference/counters.md") == set()
    assert undescribed(of_records - {RecordStatus.OK.value}, "reference/formats.md") == set()
