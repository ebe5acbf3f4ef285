"""What makes a cluster's memory: its files agree, and servers run with them, under TLS and as their users."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import Command
from tests.support.redis_masters import keeper
from tests.support.redis_servers import RedisServer, TlsFiles, make_tls_files, redis_program
from tiered_kv.config.stack_config import load_config
from tiered_kv.config.units import parse_bytes
from tiered_kv.testing.control import wait_until

pytest.importorskip("redis", reason="redis-py is not installed")

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
PORT = 6379

Manifest = dict[str, Any]  # Any: YAML
MANIFESTS: list[Manifest] = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))
KUSTOMIZATION: Manifest = yaml.safe_load((CLUSTER / "kustomization.yaml").read_text())
COMPOSE: Manifest = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
STACK = (CLUSTER / "stack.yaml").read_text()
CONF = (CLUSTER / "valkey.conf").read_text()
USERS = (CLUSTER / "users.acl").read_text()


def manifest(kind: str) -> Manifest:
    (found,) = (each for each in MANIFESTS if each["kind"] == kind)
    return found


def pod(kind: str) -> Manifest:
    spec: Manifest = manifest(kind)["spec"]["template"]["spec"]
    return spec


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name} (.*)$", CONF, re.MULTILINE)
    return str(value)


@pytest.mark.parametrize("each", MANIFESTS, ids=[each["kind"] for each in MANIFESTS])
def test_kubernetes_accepts_the_manifests(each: Manifest) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(each, "1.31", strict=True)


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_the_volumes_of_a_pod_exist_and_are_mounted_and_its_labels_selected(kind: str) -> None:
    spec, found = pod(kind), manifest(kind)["spec"]
    assert found["selector"]["matchLabels"].items() <= found["template"]["metadata"]["labels"].items()
    claimed = {each["metadata"]["name"] for each in found.get("volumeClaimTemplates", [])}
    (container,) = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == claimed | {
        each["name"] for each in spec["volumes"]
    }
    made = {each["name"] for each in KUSTOMIZATION["configMapGenerator"] + KUSTOMIZATION["secretGenerator"]}
    for volume in spec["volumes"]:
        name = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        assert name in made | {"memory-tls", None}, volume
    for generator in KUSTOMIZATION["configMapGenerator"] + KUSTOMIZATION["secretGenerator"]:
        assert all((CLUSTER / file).is_file() for file in generator["files"])


def test_nodes_are_on_hosts_of_their_own_and_the_keeper_knows_all() -> None:
    nodes, service = manifest("StatefulSet"), manifest("Service")
    labels = nodes["spec"]["template"]["metadata"]["labels"]
    (rule,) = pod("StatefulSet")["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    for selector in (
        rule["labelSelector"]["matchLabels"],
        service["spec"]["selector"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    name = service["metadata"]["name"]
    assert nodes["spec"]["serviceName"] == name
    (keeper,) = pod("Deployment")["containers"]
    told = {each["name"]: each.get("value") for each in keeper["env"]}
    numbers = range(nodes["spec"]["replicas"])
    assert told["PEERS"].split() == [f"{nodes['metadata']['name']}-{number}.{name}:{PORT}" for number in numbers]


def test_the_ports_of_the_files_are_one() -> None:
    (container,) = pod("StatefulSet")["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {each["name"]: each["port"] for each in manifest("Service")["spec"]["ports"]}
    assert ports == {"memory": PORT, "bus": PORT + 10_000}
    assert (int(setting("tls-port")), setting("port")) == (PORT, "0"), "nothing without TLS"
    (tier,) = yaml.safe_load(STACK)["secondary"]
    assert {int(node.rpartition(":")[2]) for node in tier["nodes"]} == {PORT}


def test_a_node_is_a_cache_and_has_room_beside_its_values() -> None:
    assert setting("maxmemory-policy") == "allkeys-lru"
    assert (setting("save"), setting("appendonly")) == ('""', "no")
    assert setting("cluster-require-full-coverage") == "no"
    (container,) = pod("StatefulSet")["containers"]
    arguments = container["args"]
    (memory,) = {container["resources"][each]["memory"] for each in ("requests", "limits")}
    values = parse_bytes(arguments[arguments.index("--maxmemory") + 1].replace("gb", "GiB"))
    assert parse_bytes(memory + "B") >= values * 9 // 8
    node = COMPOSE["services"]["node"]
    given, limit = (re.findall(r"\$\{\w+:-(\d+)g", str(text))[0] for text in (node["command"], node["mem_limit"]))
    assert int(limit) >= int(given) * 9 / 8


def test_the_containers_read_the_files_that_are_mounted() -> None:
    for service in COMPOSE["services"].values():
        mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
        for file, place in mounts.items():
            assert not file.startswith("./") or (CLUSTER / file).exists() or file == "./tls"
            assert place.startswith(("/etc/memory/", "/acl/", "/tls", "/data"))
    assert COMPOSE["volumes"].keys() == {"memory"}
    for path in ("tls-cert-file", "tls-key-file", "tls-ca-cert-file", "aclfile", "cluster-config-file"):
        assert setting(path).startswith(("/tls/", "/acl/", "/data/"))


def test_passwords_of_the_files_agree() -> None:
    (keeper,) = re.findall(r"^user keeper on >(\S+)", USERS, re.MULTILINE)
    (secrets,) = KUSTOMIZATION["secretGenerator"]
    assert secrets["literals"] == [f"keeper={keeper}"]
    assert "default off" in USERS


class Node(RedisServer):
    """A server as the example starts it, with its folders in `directory`."""

    def __init__(self, directory: Path, tls: TlsFiles) -> None:
        super().__init__(directory, tls=tls)
        text = CONF
        for place in ("tls/tls.crt", "tls/tls.key", "tls/ca.crt", "acl/users.acl", "data/nodes.conf"):
            text = text.replace(f"/{place}", str(directory / Path(place).name))
        for file, name in ((tls.cert, "tls.crt"), (tls.key, "tls.key"), (tls.ca, "ca.crt")):
            (directory / name).write_bytes(file.read_bytes())
        (directory / "users.acl").write_text(USERS)
        self._conf = directory / "valkey.conf"
        self._conf.write_text(text.replace(f"tls-port {PORT}", f"tls-port {self.port}"))

    def command(self) -> list[str]:
        options = ["--maxmemory", "64mb", "--cluster-announce-hostname", "localhost", "--bind", "127.0.0.1"]
        return [redis_program(), str(self._conf), *options]

    def answers(self) -> bool:
        try:
            return self.call("PING").startswith(b"-NOAUTH")
        except OSError:
            return False


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed")
    tls = make_tls_files(tmp_path)
    started = [Node(tmp_path / str(number), tls) for number in range(3)]
    try:
        for node in started:
            node.start()
        yield started
    finally:
        for node in started:
            node.kill()


@pytest.mark.slow
def test_the_servers_of_the_files_become_one_cluster_that_passes_the_check(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passwords = dict(re.findall(r"^user (\w+) on >(\S+)", USERS, re.MULTILINE))
    options = COMPOSE["services"]["keeper"]["environment"]["CLI_OPTIONS"].replace(
        "/tls/ca.crt", str(tmp_path / "ca.pem")
    )
    monkeypatch.setenv("REDISCLI_AUTH", passwords["keeper"])
    monkeypatch.setenv("MEMORY_PASSWORD", passwords["engines"])
    stack = yaml.safe_load(STACK)
    (tier,) = stack["secondary"]
    tier |= {"nodes": [f"localhost:{node.port}" for node in nodes], "tls_ca": str(tmp_path / "ca.pem")}
    stack["primary"] = {"capacity": "8MiB"}
    file = tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(stack))

    def has_slots(node: Node, count: int) -> bool:
        command = ["redis-cli", *options.split(), "-p", str(node.port), "CLUSTER", "NODES"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        (own,) = (line.split() for line in answer.stdout.splitlines() if "myself" in line)
        slots = [[int(each) for each in text.split("-")] for text in own[8:] if not text.startswith("[")]
        return sum(each[-1] - each[0] + 1 for each in slots) >= count

    addresses = [f"127.0.0.1:{node.port}" for node in nodes]
    with keeper(addresses[:2], CLI_OPTIONS=options):
        wait_until(lambda: all(has_slots(node, 8000) for node in nodes[:2]), 120.0, pause_s=0.2)
    with keeper(addresses, CLI_OPTIONS=options):  # the last one comes later, and gets a third of the slots
        wait_until(lambda: all(has_slots(node, 5400) for node in nodes), 300.0, pause_s=0.5)
    checked = Command(capsys, "check").json(str(file), "--block-bytes", "16KiB")
    assert [(each["name"], each["ok"]) for each in checked["tiers"]] == [("cpu", True), ("memory", True)]
    described = checked["tiers"][1]["details"]
    assert "warning" not in described
    assert set(described["servers"].split(", ")) == {f"localhost:{node.port}" for node in nodes}, (
        "they are not called by name"
    )


def test_the_example_s_stack_is_valid_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMORY_PASSWORD", "any")
    said_by_engines = {"block": {"bytes": "1MiB", "tokens": 16}, "namespace": {"model": "m"}}
    (tier,) = load_config({**yaml.safe_load(STACK), **said_by_engines}).secondary
    assert (tier.type, tier.name) == ("redis", "memory")
