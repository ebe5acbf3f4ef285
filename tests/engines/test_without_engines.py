"""What the engines' plugins say with no engine: which versions were tested, and what a configuration lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import output_with_engine

TRY = """
import importlib, sys
from tiered_kv.errors import ConfigError
try:
    integration = importlib.import_module("tiered_kv_" + sys.argv[1])
except ConfigError as error:
    print(error)
else:
    print("imported", getattr(integration, sys.argv[1].upper() + "_VERSION"))
"""


def import_with(tmp_path: Path, engine: str, version: str | None, **variables: str) -> str:
    return output_with_engine(tmp_path, engine, version, TRY, engine, **variables)


@pytest.mark.parametrize(
    ("engine", "needs"),
    [
        ("vllm", "needs vLLM (0.32.0 and 0.33.0 are tested), and it is not installed here"),
        ("sglang", "needs SGLang (0.5.23 is tested), and it is not installed here"),
        ("lmcache", "needs LMCache (0.5.6 is tested), and it is not installed here"),
    ],
)
def test_without_an_engine_the_error_says_which_are_tested(engine: str, needs: str, tmp_path: Path) -> None:
    assert needs in import_with(tmp_path, engine, None)


@pytest.mark.parametrize(
    ("engine", "version"),
    [
        *(("vllm", version) for version in ("0.32.0", "0.32.0+cpu", "0.33.1")),
        *(("sglang", version) for version in ("0.5.23", "0.5.23+cpu")),
        ("lmcache", "0.5.6"),
    ],
)
def test_tested_versions_are_taken(engine: str, version: str, tmp_path: Path) -> None:
    assert import_with(tmp_path, engine, version) == f"imported {version}"


@pytest.mark.one_quick(5)
@pytest.mark.parametrize(
    ("engine", "name", "version"),
    [
        *(("vllm", "vLLM", version) for version in ("0.31.2", "0.34.0", "1.0.0", "dev")),
        *(
            ("sglang", "SGLang", version)
            for version in ("0.5.22", "0.5.23.dev3", "0.5.23.post1", "0.5.24", "0.6.0", "dev")
        ),
        *(("lmcache", "LMCache", version) for version in ("0.5.5", "0.5.7", "0.6.0", "unknown")),
    ],
)
def test_an_untested_version_is_a_clear_error(engine: str, name: str, version: str, tmp_path: Path) -> None:
    message, anyhow = import_with(tmp_path, engine, version), f"TIERED_KV_ANY_{engine.upper()}"
    assert message.startswith(f"{name} {version} is installed")
    assert f"{anyhow}=1" in message
    assert import_with(tmp_path, engine, version, **{anyhow: "1"}) == f"imported {version}"


# What the LMCache adapter says of its configuration, with no LMCache installed.


READ = """
import json, sys
import tiered_kv_lmcache as integration
from tiered_kv.errors import ConfigError
from tiered_kv_lmcache.tier_set import read_settings

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
            "adapter_params.tiers.0.capactiy: unknown key, with the value 1 (did you mean 'capacity'?)",
        ),
        (
            {"tiers": [NVME, NVME], "namespace": NAMESPACE},
            "adapter_params.tiers.1.name: the name 'nvme' is taken by another tier",
        ),
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
