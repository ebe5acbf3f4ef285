"""What a third-party tier's type declares is exposed as the built-in tiers' own metrics are."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.obedient import ObedientSettings, ObedientTier, obedient, put, stack_of
from tests.support.stacks import plugged
from tiered_kv.cli.ask import read_status, view_of
from tiered_kv.cli.doctor import Readings, TierReading
from tiered_kv.cli.main import main
from tiered_kv.config.hooks import TierPlugins, TierType, hookimpl, tier_plugins
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import Counters
from tiered_kv.metrics.histogram import Histogram
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import common_metrics
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.rig import make_keys

FLUSHED = Metric("flushed_pages_total", "Pages flushed to the device.", ("cause",), values=(("full",), ("idle",)))
DIRTY = Metric("dirty_bytes", "Bytes that wait for a flush.")
FLUSHES = Metric("flush_seconds", "Time of a flush.", bounds=(0.1, 1.0))
METRICS = (*common_metrics("used_bytes", "capacity_bytes"), FLUSHED, DIRTY, FLUSHES)


def kind(name: str, *metrics: Metric) -> TierType:
    return TierType(name, ObedientSettings, lambda: ObedientTier, metrics=metrics)


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A stack over a tier of a third-party plugin that has counted."""
    with (
        plugged(kind("ledger", *METRICS)),
        open_stack(stack_of({"type": "ledger", "name": "disk"}, metrics={"listen": "127.0.0.1:0"})) as stack,
    ):
        counters, flushes = Counters(METRICS), Histogram(FLUSHES.bounds)
        counters.add("flushed_pages_total", "full", count=7)
        flushes.add(0.5)
        obedient(stack).own_counters = {
            **counters.snapshot(),
            "dirty_bytes": 8192,
            "used_bytes": 4096,
            "flush_seconds": flushes.snapshot(),
            "whim": 3,
        }
        put(stack, make_keys(4))
        yield stack


def page(stack: Stack, path: str) -> str:
    assert stack.server is not None
    with urlopen(f"http://127.0.0.1:{stack.server.port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def test_each_declared_metric_is_a_series_with_its_help_its_kind_and_its_labels(stack: Stack) -> None:
    text = page(stack, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric, its_type in ((FLUSHED, "counter"), (DIRTY, "gauge"), (FLUSHES, "histogram")):
        family = families[f"tiered_kv_tier_{metric.stem}"]
        assert (family.documentation, family.type) == (metric.help, its_type)
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    tier = ("tier", "disk")
    assert samples["tiered_kv_tier_flushed_pages_total", ("cause", "full"), tier] == 7
    assert samples["tiered_kv_tier_flushed_pages_total", ("cause", "idle"), tier] == 0, "it exists from the start"
    assert samples["tiered_kv_tier_dirty_bytes", tier] == 8192
    assert samples["tiered_kv_tier_used_bytes", tier] == 4096
    assert samples["tiered_kv_tier_flush_seconds_bucket", ("le", "1.0"), tier] == 1
    assert samples["tiered_kv_tier_flush_seconds_sum", tier] == 0.5
    assert samples["tiered_kv_dropped_series", tier] == 0


def test_the_status_and_top_have_each_with_its_meaning(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(page(stack, "/status"))["tiers"][1]
    assert told["metrics"]["flushed_pages_total"] == {"help": FLUSHED.help, "unit": "pages", "labels": ["cause"]}
    assert told["counters"]["tier"]["flushed_pages_total"] == {"full": 7, "idle": 0}
    assert told["counters"]["tier"]["flush_seconds"]["count"] == 1
    assert told["used_bytes"] == 4096
    view = view_of(None, read_status(page(stack, "/status").encode()))
    own = {(each["name"], *each["labels"].items()): each for each in view["tiers"][1]["own"]}
    flushed = own["flushed_pages_total", ("cause", "full")]
    assert (flushed["value"], flushed["unit"], flushed["help"]) == (7, "pages", FLUSHED.help)
    assert flushed["per_s"] > 0
    assert own["dirty_bytes",]["per_s"] is None
    assert ("whim",) not in own, "nobody says what it is"
    assert stack.server is not None
    main(["top", f"127.0.0.1:{stack.server.port}", "--once", "--interval", "0.1s", "--own"])
    assert re.search(r"flushed_pages_total +disk +full +0 +7\b", capsys.readouterr().out)


def test_the_doctor_reads_it(stack: Stack) -> None:
    tier = TierReading(Readings(page(stack, "/metrics")), "disk")
    assert tier.own("flushed_pages_total") == 7


def test_what_is_not_declared_stays_a_number_by_its_name(stack: Stack) -> None:
    text = page(stack, "/metrics")
    assert re.findall(r'tiered_kv_tier_number\{.*name="(\w+)"', text) == ["whim"]


def test_a_value_of_another_form_than_declared_is_dropped_and_counted(stack: Stack) -> None:
    odd: dict[str, Any] = {
        "flushed_pages_total": 7,
        "dirty_bytes": {"a": 1},
        "flush_seconds": {"sum": 1.0, "count": 1, "buckets": {"2.0": 1}},
    }
    obedient(stack).own_counters = odd
    text = page(stack, "/metrics")
    assert 'tiered_kv_dropped_series{tier="disk"} 3.0' in text
    assert not re.search(r"^tiered_kv_tier_(dirty|flush_seconds)", text, re.MULTILINE)


@pytest.mark.parametrize("count", [math.nan, math.inf, -1, "7", None])
def test_a_counter_has_only_counts(stack: Stack, count: object) -> None:
    obedient(stack).own_counters = {"flushed_pages_total": {"full": count, "idle": 2}, "dirty_bytes": -1}
    text = page(stack, "/metrics")
    assert re.findall(r'^tiered_kv_tier_flushed_pages_total\{cause="(\w+)"', text, re.MULTILINE) == ["idle"]
    assert 'tiered_kv_dropped_series{tier="disk"} 1.0' in text
    assert 'tiered_kv_tier_dirty_bytes{tier="disk"} -1.0' in text, "a gauge is any number"


@pytest.mark.parametrize(
    ("name", "more", "word"),
    [
        ("Flushed", {}, "lower-case"),
        ("flushed__pages", {}, "lower-case"),
        ("x" * 65, {}, "64 characters"),
        ("flush_count", {}, "_count"),
        ("flush_ms", {}, "seconds"),
        ("written_mib_total", {}, "bytes"),
        ("pages", {"help": ""}, "help"),
        ("pages", {"help": "one\ntwo"}, "help"),
        ("pages_total", {"labels": "cause"}, "labels"),
        ("pages_total", {"labels": ("cause", "cause")}, "labels"),
        ("pages_total", {"labels": ("tier",)}, "label 'tier'"),
        ("pages_total", {"labels": ("engine",)}, "label 'engine'"),
        ("pages_total", {"labels": ('a"b',)}, "label"),
        ("flush_seconds", {"bounds": (1.0, 1.0)}, "bounds"),
        ("flush_seconds", {"bounds": (1.0, float("inf"))}, "bounds"),
        ("flush_seconds_total", {"bounds": (1.0,)}, "histogram"),
        ("pages_total", {"labels": ("cause",), "values": (("a", "b"),)}, "values"),
    ],
)
def test_a_malformed_metric_is_refused_where_it_is_made(name: str, more: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        Metric(**{"name": name, "help": "What it counts.", **more})


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ((Metric("pages", "Pages."), Metric("pages_total", "Pages.")), ["'pages'", "'pages_total'"]),
        ((Metric("number", "A number."),), ["'number'"]),
        ((Metric("used_bytes", "Bytes of another kind."),), ["'used_bytes'", "count against the capacity", "common"]),
        (("pages_total",), ["tuple of Metric"]),
        (tuple(Metric(f"n{number}", "A number.") for number in range(129)), ["129"]),
    ],
)
def test_metrics_that_prometheus_cannot_tell_apart_are_refused_with_their_tier_type(
    metrics: tuple[Any, ...], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        kind("ledger", *metrics)
    assert all(word in str(raised.value) for word in ["'ledger'", *words])


class Plugin:
    def __init__(self, *types: TierType) -> None:
        self._types = types

    @hookimpl
    def tiered_kv_register_tiers(self) -> list[TierType]:
        return [*self._types]


def test_a_name_that_another_tier_type_declares_otherwise_is_refused_at_registration() -> None:
    plugins = TierPlugins()
    plugins.register(Plugin(kind("ledger", FLUSHED)), "first")
    other = Metric("flushed_pages_total", "Pages, of whatever.")
    with pytest.raises(ConfigError) as raised:
        plugins.register(Plugin(kind("drawer", other)), "second")
    assert all(word in str(raised.value) for word in ("drawer", "ledger", "flushed_pages_total", FLUSHED.help))
    assert [*plugins.tier_types()] == ["ledger"], "nothing of the second was registered"
    plugins.register(Plugin(kind("drawer", FLUSHED, DIRTY)), "third")
    assert [*plugins.tier_types()] == ["drawer", "ledger"], "what is declared alike is shared"
    plugins.unregister("first")
    plugins.unregister("third")
    plugins.register(Plugin(kind("drawer", other)), "fourth")


def test_a_built_in_tier_s_name_cannot_be_taken() -> None:
    segments = Metric("segments", "Parts of an orange.")
    with pytest.raises(ConfigError, match="nvme"), plugged(kind("orange", segments)):
        pass
    assert "orange" not in tier_plugins().tier_types()


ORANGE = kind("orange", Metric("peeled_slices_total", "Slices."))


def test_a_tier_type_that_the_stack_names_by_its_module_is_checked_too() -> None:
    reference = f"{__name__}:ORANGE"
    lemon = kind("lemon", Metric("peeled_slices_total", "Slices of lemon."))
    with plugged(lemon), pytest.raises(ConfigError, match="lemon"):
        open_stack(stack_of({"type": reference, "name": "orange"}))
    with open_stack(stack_of({"type": reference, "name": "orange"}, metrics={"listen": "127.0.0.1:0"})) as stack:
        obedient(stack).own_counters = {"peeled_slices_total": 5}
        assert 'tiered_kv_tier_peeled_slices_total{tier="orange"} 5.0' in page(stack, "/metrics")
