"""What the LMCache adapter says of its configuration, with no LMCache installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.pretended_engines import told_beside

READ = """
import json, sys
from tiered_kv.errors import ConfigError
try:
    import tiered_kv.integrations.lmcache as integration
    from tiered_kv.integrations.lmcache.settings import read_settings
    settings = read_settings(json.loads(sys.argv[1]))
except ConfigError as error:
    print(error)
else:
    print(integration.LMCACHE_VERSION, [tier.name for tier in settings.tiers], settings.sets)
"""
NVME = {"type": "nvme", "path": "/nowhere", "capacity": "1GiB"}
NAMESPACE = {"revision": "main"}


def read(tmp_path: Path, params: object, **variables: str) -> str:
    """Return what comes of reading `adapter_params` beside the LMCache that was tested."""
    return told_beside(tmp_path, "lmcache", "0.5.6", READ, json.dumps(params), **variables)


def test_settings_are_those_of_a_stack_s_tiers(tmp_path: Path) -> None:
    params = {"tiers": [NVME, {**NVME, "name": "${SECOND}"}], "namespace": NAMESPACE, "sets": 2}
    assert read(tmp_path, params, SECOND="b") == "0.5.6 ['nvme', 'b'] 2"


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"tiers": [NVME]}, "adapter_params.namespace: this key is required"),
        ({"tiers": [NVME], "namespace": {}}, "adapter_params.namespace.revision: this key is required"),
        ({"namespace": NAMESPACE}, "adapter_params.tiers: this key is required"),
        ({"tiers": [], "namespace": NAMESPACE}, "adapter_params.tiers: "),
        ({"tiers": NVME, "namespace": NAMESPACE}, "adapter_params.tiers: expected a list of tiers"),
        ({"tiers": [{**NVME, "path": ""}], "namespace": NAMESPACE}, "adapter_params.tiers.0.path: expected"),
        (
            {"tiers": [NVME | {"capactiy": 1}], "namespace": NAMESPACE},
            "adapter_params.tiers.0.capactiy: unknown key, with the value ***; did you mean 'capacity'?",
        ),
        ({"tiers": [NVME, NVME], "namespace": NAMESPACE}, "adapter_params.tiers.1.name: another tier is called 'nvme'"),
        (
            {"tiers": [NVME | {"job_timeout": "5min"}], "namespace": NAMESPACE},
            "adapter_params.tiers.0.job_timeout: expected at most 120s, found 300s",
        ),
        ({"tiers": [NVME], "namespace": NAMESPACE | {"model": "m"}}, "adapter_params.namespace.model: unknown key"),
        ({"tiers": [NVME], "namespace": NAMESPACE | {"model": "m"}}, "LMCache tells it"),
        ({"tiers": [NVME | {"path": "${NOT_SET}"}], "namespace": NAMESPACE}, "NOT_SET"),
        ({"tiers": [NVME], "namespace": NAMESPACE, "set": 2}, "did you mean 'sets'?"),
    ],
)
def test_what_cannot_be_used_is_named(params: Mapping[str, Any], says: str, tmp_path: Path) -> None:
    assert says in read(tmp_path, params)
