"""Metrics of stacks as Prometheus reads them, and of third-party tiers, whatever these count."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.obedient import BLOCK_BYTES, get, obedient, put, stack_of
from tests.support.pages import tier_metrics
from tiered_kv.config.stack_config import load_config
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import count_of
from tiered_kv.metrics.vocabulary import ATTACHED, EVENTS, MANAGER, RECORDING, SERVER, TENANTS
from tiered_kv.stack.exporters.metrics import NAME_SERIES_MAX, StackCollector, exposition
from tiered_kv.stack.exporters.status import status
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.rig import make_keys

KEYS = make_keys(64)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    memory = {"type": "memory", "capacity": "256KiB", "write_budget": "1PiB/day"}
    with open_stack(stack_of(memory, nvme)) as stack:
        yield stack


def samples(stack: Stack) -> list[Sample]:
    text = exposition(StackCollector(stack.counters, secrets=stack.config.secret_texts())).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def openmetrics_of(registry: CollectorRegistry) -> list[Metric]:
    text: Any = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    return list(openmetrics_parser.text_string_to_metric_families(text.decode()))  # type: ignore[no-untyped-call]


def test_hits_and_misses_are_0_and_not_absent_before_the_first_request(stack: Stack) -> None:
    first = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples(stack)}
    for tier in ("cpu", "memory", "nvme"):
        for labels in ({"result": "hit"}, {"result": "miss"}):
            assert first["tiered_kv_blocks_total", *sorted({"tier": tier, **labels}.items())] == 0
        assert first["tiered_kv_misses_total", ("reason", "evicted"), ("tier", tier)] == 0


def test_every_metric_of_the_vocabulary_appears(stack: Stack) -> None:
    put(stack, KEYS)
    assert get(stack, KEYS) == 64
    exposed = samples(stack)
    names = {sample.name for sample in exposed}
    for name, metric in MANAGER.items():
        if "audit" in name or name in {**ATTACHED, **EVENTS, **RECORDING, **SERVER, **TENANTS}:  # there is none
            continue
        found = [f"tiered_kv_{name}"]
        if metric.bounds:
            found = [f"tiered_kv_{name}{ending}" for ending in ("_bucket", "_sum", "_count")]
        assert names.issuperset(found), name
    counters = stack.counters()
    for tier in ("memory", "nvme"):
        for name, value in counters[tier]["tier"].items():
            assert name in tier_metrics()
            if value == {}:  # nothing went wrong
                continue
            own = [sample for sample in exposed if sample.name == f"tiered_kv_tier_{name}"]
            assert [sample.value for sample in own if sample.labels == {"tier": tier}] == [value]


def test_the_values_are_those_of_the_counters(stack: Stack) -> None:
    put(stack, KEYS)
    assert get(stack, KEYS) == 64
    values = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples(stack)}
    counters = stack.counters()
    for tier in ("cpu", "memory", "nvme"):
        for name in ("stored_bytes_total", "loaded_blocks_total"):
            assert values[f"tiered_kv_{name}", ("tier", tier)] == counters[tier][name]
    stored = count_of(counters, "nvme", "submitted_jobs_total", "store")
    labels = ("direction", "store"), ("le", "+Inf"), ("tier", "nvme")
    assert values["tiered_kv_job_seconds_bucket", *labels] == stored > 0
    assert values["tiered_kv_restored_tokens_total", ("tier", "cpu")] == 64 * 16
    assert values["tiered_kv_used_bytes", ("tier", "cpu")] == 16 * BLOCK_BYTES
    assert get(stack, make_keys(2, "absent")) == 0
    counters = stack.counters()
    for tier in status(stack.observed())["tiers"]:
        for name in ("stored_bytes_total", "loaded_bytes_total", "blocks_total", "misses_total"):
            assert tier["counters"][name] == counters[tier["name"]][name]
        assert tier["counters"]["misses_total"]


def test_labels_of_an_engine_are_on_every_metric_and_a_closed_stack_has_none(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with open_stack(stack_of({"type": "memory", "capacity": "256KiB"})) as stack:
        registry.register(StackCollector(stack.counters, labels={"engine": "3"}))
        exposed = list(text_string_to_metric_families(generate_latest(registry).decode()))
        assert {sample.labels.get("engine") for family in exposed for sample in family.samples} == {"3"}
    assert generate_latest(registry) == b""


# Names from elsewhere.

NAMES = ("two\nlines 1", 'quo"ted"} 1', "back\\slash", "x" * 10_000, "größe \N{SNOWMAN}", "{a,b}", " ")
PLAIN = re.compile(r"[\w.+-]{1,64}", re.ASCII)
SERIES_MAX = 500
"""Of a stack with two secondary tiers."""


@pytest.mark.parametrize("name", NAMES)
def test_a_tier_s_name_is_a_plain_word_or_refused(name: str) -> None:
    for setting in ("name", "type"):
        with pytest.raises(ConfigError):
            load_config(stack_of({"type": "memory", "capacity": "256KiB", setting: name}))


@pytest.mark.parametrize("name", [name[:1000] for name in NAMES])
def test_no_name_of_a_model_and_no_key_is_shown(name: str) -> None:
    namespace = {"model": f"tulip {name}", "tenant": f"tulip {name}"}
    with open_stack(stack_of({"type": "memory", "capacity": "256KiB"}, namespace=namespace)) as stack:
        put(stack, KEYS)
        exposed = samples(stack)
        shown = f"{exposed} {status(stack.observed())}"
    assert all(PLAIN.fullmatch(label) for sample in exposed for label in sample.labels.values())
    assert len(exposed) < SERIES_MAX
    assert "tulip" not in shown
    assert not any(key.hex() in shown or repr(bytes(key)) in shown for key in KEYS)


@pytest.mark.one_quick(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_label_of_an_engine_is_read_as_it_was_whatever_it_is(stack: Stack, name: str) -> None:
    put(stack, KEYS)
    registry = CollectorRegistry()
    registry.register(StackCollector(stack.counters, labels={"model_name": name}))
    exposed = list(text_string_to_metric_families(generate_latest(registry).decode()))
    found = [sample for family in exposed for sample in family.samples]
    assert {sample.labels["model_name"] for sample in found} == {name}
    assert len(found) == len(samples(stack)) < SERIES_MAX


# Third-party tiers.


HOSTILE: Mapping[Any, Any] = {
    **{f"n{number}_total": number for number in range(1000)},
    **{f"labelled_{number}": {f"label-{each}": each for each in range(50)} for number in range(50)},
    "failed_blocks_total": {"load": {f"reason-{number}": 1 for number in range(5000)}},
    "used_bytes": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}},
    "capacity_bytes": "a lot",
    "x" * 10_000: 1,
    "": 1,
    'quote"\n# HELP fake\nfake 1': 1,
    "größe": 1,
    "segments_total": 7,
    "blocks_bucket": 1,
    "twice": 1,
    "twice_total": 2,
    "a-b": 1,
    "a_b": 1,
    7: 7,
    "nothing": None,
    "huge": 10**400,
    "nan": math.nan,
    "infinite": math.inf,
    "labels": {'evil"} 1\nfake{x="': 1, ("a", "b"): 2, None: 3},
    "histogram": {"buckets": {"1": "one"}, "sum": "?", "count": None},
}


def test_a_third_party_tier_s_counters_are_bounded_and_readable_whatever_they_are() -> None:
    tiers = [{"type": "obedient", "name": f"odd.name_{number}-"} for number in range(2)]
    with open_stack(stack_of(*tiers, {"type": "memory", "capacity": "256KiB"})) as stack:
        for number in range(2):
            obedient(stack, number).own_counters = HOSTILE
        exposed = samples(stack)
        json.dumps(status(stack.observed()), allow_nan=False)
        own = [sample for sample in exposed if sample.labels.get("tier") == "odd.name_0-"]
        strange = [sample for sample in own if sample.name == "tiered_kv_tier_number"]
        assert 0 < len(strange) <= NAME_SERIES_MAX
        assert len(own) < 400
        assert not [sample for sample in exposed if "fake" in sample.name or "\n" in str(sample.labels)]
        identities = [(sample.name, *sorted(sample.labels.items())) for sample in exposed]
        assert len(set(identities)) == len(identities)
        dropped = {
            sample.labels["tier"]: sample.value for sample in exposed if sample.name == "tiered_kv_dropped_series"
        }
        assert dropped["odd.name_0-"] > 1000
        assert dropped["memory"] == 0
        registry = CollectorRegistry()
        registry.register(StackCollector(stack.counters))
        assert openmetrics_of(registry)


class BrokenFloat(float):
    def __float__(self) -> float:
        raise RuntimeError


def test_a_number_that_no_float_can_hold_is_null_in_the_status() -> None:
    with open_stack(stack_of({"type": "obedient"})) as stack:
        obedient(stack).own_counters = {"huge": 10**400, "used_bytes": -(10**400), "own": 1, "broken": BrokenFloat(1)}
        (_, tier) = status(stack.observed())["tiers"]
        assert tier["counters"]["tier"] == {"huge": None, "used_bytes": None, "own": 1, "broken": None}
        assert {sample.value for sample in samples(stack) if sample.name == "tiered_kv_tier_number"} == {1}


def test_a_third_party_tier_cannot_hide_the_counters_of_others(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with open_stack(stack_of({"type": "obedient"}, nvme)) as stack:
        obedient(stack).own_counters = {"segments_total": 1, "blocks": 5, "own_total": {"a": {"b": 2}}}
        exposed = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples(stack)}
    assert exposed["tiered_kv_tier_blocks", ("tier", "obedient")] == 5
    for labels, name, value in (("", "segments_total", 1), ("a,b", "own_total", 2)):
        named = ("labels", labels), ("name", name), ("tier", "obedient")
        assert exposed["tiered_kv_tier_number", *named] == value
    assert ("tiered_kv_tier_segments", ("tier", "nvme")) in exposed


def test_reasons_of_a_third_party_tier_are_words() -> None:
    with open_stack(stack_of({"type": "obedient", "breaker_failures": 1000})) as stack:
        obedient(stack).store_reason = "cannot reach host-1 as user:password"
        put(stack, KEYS)
        failed = [sample for sample in samples(stack) if sample.name == "tiered_kv_failed_blocks_total"]
    assert {sample.labels["reason"] for sample in failed if sample.value} == {"error"}


def test_no_secret_is_a_name_or_a_label() -> None:
    secret = secrets.token_hex(32)
    own = {secret: 1, f"a_{secret}_total": 2, "corrupt_blocks_total": {secret: 3}, "other": {f"x{secret}": 4}}
    memory = {"type": "memory", "capacity": "1MiB", "codec": "aes-256-gcm", "encryption": {"keys": {1: secret}}}
    with open_stack(stack_of({"type": "obedient"}, memory)) as stack:
        obedient(stack).own_counters = own
        text = exposition(StackCollector(stack.counters, secrets=stack.config.secret_texts())).decode()
        shown = str(status(stack.observed()))
    assert secret not in text
    assert secret not in shown
    assert "tiered_kv_tier_corrupt_blocks_total" in text
