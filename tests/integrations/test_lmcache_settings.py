"""What the LMCache adapter says of its configuration, with no LMCache installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.children import output_with_engine

READ = """
import json, sys
import tiered_kv.integrations.lmcache as integration
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.lmcache.settings import read_settings

def outcome_of(params):
    try:
        settings = read_settings(params)
    except ConfigError as error:
        return str(error)
    return f"{integration.LMCACHE_VERSION} {[tier.name for tier in settings.tiers]} {settings.sets}"

print(json.dumps([outcome_of(params) for params in json.loads(sys.argv[1])]))
"""
NVME = {"type": "nvme", "path": "/nowhere", "capacity": "1GiB"}
NAMESPACE = {"revision": "main"}


def read(tmp_path: Path, *params: object, **variables: str) -> list[str]:
    """Return what comes of reading each `adapter_params` beside the LMCache that was tested."""
    answers: list[str] = json.loads(
        output_with_engine(tmp_path, "lmcache", "0.5.6", READ, json.dumps(params), **variables)
    )
    return answers


def test_settings_are_those_of_a_stack_s_tiers(tmp_path: Path) -> None:
    params = {"tiers": [NVME, {**NVME, "name": "${SECOND}"}], "namespace": NAMESPACE, "sets": 2}
    assert read(tmp_path, params, SECOND="b") == ["0.5.6 ['nvme', 'b'] 2"]


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    said: list[tuple[Mapping[str, Any], str]] = [
        ({"tiers": [NVME]}, "adapter_params.namespace: this key is required"),
        ({"tiers": [NVME], "namespace": {}}, "adapter_params.namespace.revision: this key is required"),
        ({"namespace": NAMESPACE}, "adapter_params.tiers: this key is required"),
        ({"tiers": [], "namespace": NAMESPACE}, "adapter_params.tiers: "),
        ({"tiers": NVME, "namespace": NAMESPACE}, "adapter_params.tiers: expected a list of tiers"),
        ({"tiers": [{**NVME, "path": ""}], "namespace": NAMESPACE}, "adapter_params.tiers.0.path: expected"),
        (
            {"tiers": [NVME | {"capactiy": 1}], "namespace": NAMESPACE},
            "adapter_params.tiers.0.capactiy: unknown key, with the value 1; did you mean 'capacity'?",
        ),
        ({"tiers": [NVME, NVME], "namespace": NAMESPACE}, "adapter_params.tiers.1.name: another tier is called 'nvme'"),
        (
            {"tiers": [NVME | {"job_timeout": "5min"}], "namespace": NAMESPACE},
            "adapter_params.tiers.0.job_timeout: expected at most 120s, found 300s",
        ),
        ({"tiers": [NVME], "namespace": NAMESPACE | {"model": "m"}}, "adapter_params.namespace.model: unknown key"),
        ({"tiers": [NVME], "namespace": NAMESPACE | {"model": "m"}}, "LMCache sets it"),
        ({"tiers": [NVME | {"path": "${NOT_SET}"}], "namespace": NAMESPACE}, "NOT_SET"),
        ({"tiers": [NVME], "namespace": NAMESPACE, "set": 2}, "did you mean 'sets'?"),
    ]
    answers = read(tmp_path, *(params for params, _ in said))
    for (params, says), answer in zip(said, answers, strict=True):
        assert says in answer, params
