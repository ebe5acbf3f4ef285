"""Counts are series: each has its metric, its tier and its labels, and what users read is a view of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.obedient import WAIT_S, get, obedient, put, stack_of
from tiered_kv.metrics.counters import Counters, count_of
from tiered_kv.metrics.histogram import Histogram
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import CounterView, Family, by_label, counts_of, numbers
from tiered_kv.metrics.vocabulary import MANAGER
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.rig import make_keys

STORES = Metric("stores_total", "Stores.")
FAILED = Metric("failed_blocks_total", "Blocks.", ("direction", "reason"), values=(("load", "lost"), ("store", "full")))
SECONDS = Metric("store_seconds", "Time of a store.", bounds=(1.0, 2.0))


def registry_of(counters: Counters) -> Registry:
    times = Histogram(SECONDS.bounds)
    times.add(1.5)
    registry = Registry()
    registry.add(lambda: [("cpu", numbers({"stores_total": STORES}, {"stores_total": 2}))])
    registry.add(lambda: [("disk", counters.families()), ("disk", [Family(SECONDS, {(): times.snapshot()})])])
    registry.add_own("disk", lambda: {"used_bytes": 7}, {})
    return registry


def test_a_counter_s_series_have_their_labels_in_the_order_of_the_metric() -> None:
    counters = Counters([STORES, FAILED])
    assert [(each.metric, dict(each.values)) for each in counters.families()] == [(STORES, {(): 0}), (FAILED, {})]
    counters.add("failed_blocks_total", "load", "lost", count=3)
    counters.add("failed_blocks_total", "load", "slow")
    counters.add("failed_blocks_total", "store", "full", count=5)
    assert counters.total("failed_blocks_total") == 9
    assert counters.total("failed_blocks_total", "load") == 4
    assert counters.total("failed_blocks_total", "load", "absent") == counters.total("stores_total") == 0
    (_, failed) = counters.families()
    assert failed.values == {("load", "lost"): 3, ("load", "slow"): 1, ("store", "full"): 5}


def test_a_snapshot_has_each_series_once_with_its_tier_and_zeros_from_the_start() -> None:
    counters = Counters([STORES, FAILED])
    counters.add("failed_blocks_total", "load", "slow")
    series = list(registry_of(counters).snapshot())
    assert {
        (each.tier, each.metric.name, each.labels): each.value for each in series if each.metric is not SECONDS
    } == {
        ("cpu", "stores_total", ()): 2,
        ("disk", "stores_total", ()): 0,
        ("disk", "failed_blocks_total", ("load", "lost")): 0,
        ("disk", "failed_blocks_total", ("load", "slow")): 1,
        ("disk", "failed_blocks_total", ("store", "full")): 0,
    }
    (times,) = [each.value for each in series if each.metric is SECONDS]
    assert times == {"sum": 1.5, "count": 1, "buckets": {"1.0": 0, "2.0": 1, "+Inf": 0}}


def test_the_view_has_dictionaries_by_tier_name_and_label_and_is_the_caller_s() -> None:
    counters = Counters([FAILED])
    counters.add("failed_blocks_total", "load", "slow", count=2)
    registry = registry_of(counters)
    view = CounterView(registry.snapshot())
    assert view["disk"]["failed_blocks_total"] == {"load": {"slow": 2}}
    assert view["disk"]["tier"] == {"used_bytes": 7}
    assert [*view] == ["cpu", "disk"]
    assert "tier" not in view["cpu"]
    assert json.loads(json.dumps(view)) == view
    view["disk"]["failed_blocks_total"].clear()
    assert registry.snapshot().tiers["disk"].value("failed_blocks_total", "load", "slow") == 2


def test_what_a_view_has_is_found_again_by_the_names_of_its_labels() -> None:
    counters = Counters([STORES, FAILED])
    counters.add("failed_blocks_total", "load", "slow", count=2)
    counters.add("failed_blocks_total", "store", "full", count=3)
    view = CounterView(registry_of(counters).snapshot())["disk"]
    failed = [
        ({"direction": "load", "reason": "slow"}, 2),
        ({"direction": "store", "reason": "full"}, 3),
    ]
    assert list(counts_of(FAILED, view["failed_blocks_total"])) == failed
    assert list(counts_of(STORES, view["stores_total"])) == [({}, 0)]


def test_a_value_that_was_not_counted_is_0_and_a_total_adds_up_labels() -> None:
    counters = Counters([STORES, FAILED])
    counters.add("failed_blocks_total", "load", "slow", count=2)
    counters.add("failed_blocks_total", "store", "full", count=3)
    disk = registry_of(counters).snapshot().tiers["disk"]
    assert disk.total("failed_blocks_total") == 5
    assert disk.value("failed_blocks_total", "load", "lost") == disk.value("absent_total") == disk.total("absent") == 0


def test_further_families_of_a_tier_leave_the_snapshot_as_it_was() -> None:
    before = registry_of(Counters([STORES])).snapshot()
    more = before.with_families("cpu", [by_label(FAILED, {}), *numbers({"used": STORES}, {"used": 4})])
    assert more.tiers["cpu"].value("stores_total") == 4
    assert before.tiers["cpu"].value("stores_total") == 2
    assert more.tiers["disk"] is before.tiers["disk"]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with open_stack(stack_of({"type": "obedient", "breaker_failures": 1000}, nvme, audit=0.5)) as stack:
        yield stack


def test_a_stack_s_series_and_its_counters_say_the_same(stack: Stack) -> None:
    obedient(stack).store_reason = "full"
    put(stack, make_keys(32))
    assert get(stack, make_keys(32)) >= 0
    snapshot = stack.snapshot()
    view = CounterView(snapshot)
    assert [*view] == [*stack.counters()] == ["cpu", "obedient", "nvme"]
    assert view["obedient"]["failed_blocks_total"]["store"]["full"] > 0
    for tier, metric, labels, value in snapshot:
        assert metric is MANAGER[metric.name]
        assert len(labels) == len(metric.labels)
        if not isinstance(value, dict):
            assert count_of(view, tier, metric.name, *labels) == int(value)
    named = {(tier, family) for tier, counted in snapshot.tiers.items() for family in counted.families}
    assert named == {(tier, name) for tier, counted in view.items() for name in counted if name != "tier"}


def test_blocks_move_while_a_snapshot_is_taken(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended: list[bool] = []

    def stats() -> dict[str, int]:
        if not has_ended:
            thread = threading.Thread(target=get, args=(stack, make_keys(1, "absent")))
            thread.start()
            thread.join(WAIT_S)
            has_ended.append(not thread.is_alive())
        return {}

    monkeypatch.setattr(obedient(stack), "stats", stats)
    stack.snapshot()
    assert has_ended == [True]
