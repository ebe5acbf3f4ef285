"""What deploys one cache a host: the units, the image and the manifests are valid, and agree with each other."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.image import instructions
from tests.support.mounts import command_in_namespace, missing_for_tmpfs
from tiered_kv.config.stack_config import load_config
from tiered_kv.config.units import parse_bytes

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "examples" / "serve"
SOCKET = "/run/tiered-kv/cache.sock"
COMMAND = ["serve", "/etc/tiered-kv/stack.yaml", "--socket", SOCKET]
PORT = 9464

Manifest = dict[str, Any]  # Any: YAML
MANIFESTS: list[Manifest] = list(yaml.safe_load_all((SERVE / "kubernetes.yaml").read_text()))
COMPOSE: Manifest = yaml.safe_load((SERVE / "compose.yaml").read_text())


def manifest(kind: str) -> Manifest:
    (found,) = (each for each in MANIFESTS if each["kind"] == kind)
    return found


def pod(kind: str) -> Manifest:
    spec: Manifest = manifest(kind)["spec"]["template"]["spec"]
    return spec


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in SERVE.glob("tiered-kv.s*"):  # the program that they start has to exist
        text = unit.read_text().replace("/opt/tiered-kv/bin/tiered-kv", sys.executable)
        (tmp_path / unit.name).write_text(text)
    units = sorted(map(str, tmp_path.iterdir()))
    assert len(units) == 2
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout + done.stderr == ""


def test_the_units_and_the_image_start_the_server_alike() -> None:
    service, socket = ((SERVE / f"tiered-kv.{kind}").read_text().splitlines() for kind in ("service", "socket"))
    (start,) = (line for line in service if line.startswith("ExecStart="))
    assert start == f"ExecStart=/opt/tiered-kv/bin/tiered-kv {' '.join(COMMAND)} $TIERED_KV_OPTIONS"
    assert "Type=notify" in service
    assert f"ListenSequentialPacket={SOCKET}" in socket
    assert "Requires=tiered-kv.socket" in service
    assert "PartOf=tiered-kv.service" in socket, "else an engine's next try starts a stopped service again"
    steps = dict(instructions(SERVE / "Dockerfile"))
    assert json.loads(steps["ENTRYPOINT"]) == ["/opt/tiered-kv/bin/tiered-kv"]
    assert json.loads(steps["CMD"]) == COMMAND
    assert int(steps["EXPOSE"]) == PORT
    assert steps["USER"] == "10001:10001"


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd is not installed")
def test_a_connection_starts_the_server_which_says_that_it_is_ready_and_leaves_the_socket(tmp_path: Path) -> None:
    stack, path = tmp_path / "stack.yaml", tmp_path / "cache.sock"
    stack.write_text("primary: {capacity: 1MiB}\n")
    program = "from tiered_kv.cli.main import main; raise SystemExit(main())"
    serve = [sys.executable, "-c", program, "serve", str(stack), "--socket", str(path)]
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as states,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine,
    ):
        states.bind(str(tmp_path / "notify"))
        states.settimeout(60.0)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        options = [f"--setenv={name}={text}" for name, text in environment.items()]
        command = ["systemd-socket-activate", "--seqpacket", f"--listen={path}", *options, *serve]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                end_s = time.monotonic() + 60.0
                while engine.connect_ex(str(path)) and time.monotonic() < end_s:
                    time.sleep(0.01)
                assert states.recv(99) == b"READY=1"
                server.terminate()
                assert states.recv(99) == b"STOPPING=1"
                assert server.wait(60.0) == 0
            finally:
                server.kill()
    assert path.is_socket(), "systemd still listens there"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(bool(missing_for_tmpfs()), reason=missing_for_tmpfs())
def test_the_image_s_steps_make_a_server_that_is_not_root(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.image", str(SERVE / "Dockerfile"), str(ROOT), str(tmp_path)]
    try:
        built = subprocess.run(
            command_in_namespace(command), cwd=ROOT, check=True, capture_output=True, text=True, timeout=600
        )
    finally:
        shutil.rmtree(tmp_path)  # its mounts have ended with the process
    printed = json.loads(built.stdout)
    assert printed["version"].startswith("tiered-kv ")
    assert printed["id"].startswith("uid=10001(tiered-kv) gid=10001(tiered-kv)")
    assert printed["tiers"].startswith("/opt/tiered-kv/lib/")
    assert printed["modes"].splitlines() == ["750 10001:10001 /run/tiered-kv", "700 10001:10001 /var/lib/tiered-kv"]
    assert printed["status"] == 0


@pytest.mark.parametrize("each", MANIFESTS, ids=[each["kind"] for each in MANIFESTS])
def test_kubernetes_accepts_the_manifests(each: Manifest) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(each, "1.31", strict=True)


@pytest.mark.parametrize("kind", ["DaemonSet", "Deployment"])
def test_the_volumes_of_a_pod_are_mounted_and_its_labels_selected(kind: str) -> None:
    spec, found = pod(kind), manifest(kind)["spec"]
    assert found["selector"]["matchLabels"].items() <= found["template"]["metadata"]["labels"].items()
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_server_s_pod_is_not_root_is_probed_and_has_the_memory_that_its_stack_takes() -> None:
    (server,) = pod("DaemonSet")["containers"]
    stack = yaml.safe_load(manifest("ConfigMap")["data"]["stack.yaml"])
    assert server["securityContext"]["runAsUser"] == 10001
    assert server["securityContext"]["runAsNonRoot"]
    (port,) = server["ports"]
    assert port["containerPort"] == PORT == int(stack["metrics"]["listen"].rpartition(":")[2])
    for probe in (server["readinessProbe"], server["livenessProbe"]):
        assert probe["httpGet"] == {"path": "/healthz", "port": port["name"]}
    (memory,) = {server["resources"][each]["memory"] for each in ("requests", "limits")}
    assert parse_bytes(memory + "B") > parse_bytes(stack["primary"]["capacity"])
    assert stack["primary"].get("prefault") is not False, "else pages belong to the engine that writes to them first"


def test_the_image_writes_to_its_volumes_only() -> None:
    server = COMPOSE["services"]["cache"]
    assert server["read_only"] is pod("DaemonSet")["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert server["cap_drop"] == ["ALL"]
    assert "tmpfs" not in server
    assert all(
        re.fullmatch(r"python:3\.\d+-slim-[a-z]+( AS \w+)?", rest)
        for name, rest in instructions(SERVE / "Dockerfile")
        if name == "FROM"
    )


def test_the_engines_attach_to_the_server_s_socket() -> None:
    (container,) = pod("Deployment")["containers"]
    commands = {"kubernetes": container["args"], "compose": COMPOSE["services"]["engine"]["command"]}
    for arguments in commands.values():
        config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"]["attach"] == f"unix:{SOCKET}"
    folders = [
        {volume["name"]: volume for volume in pod(kind)["volumes"]}["socket"]["hostPath"]
        for kind in ("DaemonSet", "Deployment")
    ]
    assert folders[0] == folders[1] == {"path": str(Path(SOCKET).parent), "type": "DirectoryOrCreate"}
    assert pod("Deployment")["securityContext"]["supplementalGroups"] == [10001]
    services = COMPOSE["services"]
    for service in services.values():
        assert f"socket:{Path(SOCKET).parent}" in service["volumes"]
    assert services["engine"]["group_add"] == ["10001"]
    volumes = {volume.partition(":")[0] for service in services.values() for volume in service["volumes"]}
    assert {name for name in volumes if not name.startswith(".")} == COMPOSE["volumes"].keys()
    build = services["cache"]["build"]
    assert (SERVE / build["context"] / build["dockerfile"]).resolve() == SERVE / "Dockerfile"


@pytest.mark.parametrize("text", [(SERVE / "stack.yaml").read_text(), manifest("ConfigMap")["data"]["stack.yaml"]])
def test_the_stacks_are_valid(text: str) -> None:
    said_by_engines = {"block": {"bytes": "1MiB", "tokens": 16}, "namespace": {"model": "m"}}
    config = load_config({**yaml.safe_load(text), **said_by_engines})
    assert [tier.path for tier in config.secondary] == ["/var/lib/tiered-kv/blocks"]  # type: ignore[attr-defined]
    assert config.metrics is not None
