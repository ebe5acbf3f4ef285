"""Which variables of the environment, and which packages, are part of an engine's namespace."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tiered_kv.integrations.environment import computing_packages, counting_variables, names

COUNTS = re.compile("^(ENGINE|TRITON)_")
IRRELEVANT = names("ENGINE_THREADS")
PLUGINS = re.compile(r"^engine\.")


def counted(**variables: str) -> dict[str, str]:
    return counting_variables(COUNTS, IRRELEVANT, variables)


def test_a_variable_that_nobody_knows_counts_as_it_is_spelled() -> None:
    assert counted(ENGINE_NEW="On", TRITON_NEW="", HOME="/") == {"ENGINE_NEW": "On", "TRITON_NEW": ""}


def test_what_is_known_to_be_irrelevant_does_not_count() -> None:
    assert counted(ENGINE_THREADS="1", TRITON_CACHE_DIR="/a", ENGINE_LOG_LEVEL="INFO", ENGINE_API_KEY="secret") == {}


@pytest.mark.parametrize(
    "name",
    [
        *("ENGINE_PORT", "ENGINE_SERVICE_HOST", "ENGINE_SERVICE_PORT", "ENGINE_SERVICE_PORT_HTTP"),
        *("ENGINE_PORT_8000_TCP", "ENGINE_PORT_8000_TCP_PROTO", "ENGINE_PORT_8000_TCP_PORT"),
        *("ENGINE_PORT_8000_TCP_ADDR", "ENGINE_ROUTER_SERVICE_HOST"),
        *("ENGINE_HOST_IP", "ENGINE_HOSTNAME", "ENGINE_POD_IP", "ENGINE_POD_NAME", "ENGINE_POD_UID"),
        *("ENGINE_NODE_NAME", "ENGINE_AUTH_TOKEN", "ENGINE_PASSWORD", "ENGINE_PROFILER_DIR", "ENGINE_LOG_DIR"),
    ],
)
def test_what_differs_between_the_replicas_of_a_deployment_does_not_count(name: str) -> None:
    assert counted(**{name: "10.0.0.7"}) == {}


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    first.write_bytes(b"weights")
    second.write_bytes(b"weights")
    other.write_bytes(b"Weights")
    (tmp_path / "directory").mkdir()
    assert counted(ENGINE_FILE=str(first)) != counted(ENGINE_FILE=str(other))
    assert counted(ENGINE_FILE=str(tmp_path / "directory")) == {"ENGINE_FILE": str(tmp_path / "directory")}
    content = counted(ENGINE_FILE=str(first))["ENGINE_FILE"]
    first.write_bytes(b"Weights")
    assert counted(ENGINE_FILE=str(first))["ENGINE_FILE"] != content
    assert counted(ENGINE_FILE="/no\0path") == {"ENGINE_FILE": "/no\0path"}


def test_a_variable_that_is_no_utf8_counts_and_can_be_described() -> None:
    found = counted(**{os.fsdecode(b"ENGINE_\xff"): os.fsdecode(b"/\xfe"), "ENGINE_NAME": "\u00e9"})
    assert found == {r"ENGINE_\xff": r"/\xfe", "ENGINE_NAME": "\u00e9"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, name: str, version: str = "1.0", more: str = "", plugins: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}\nName: a text\n")
    (folder / "entry_points.txt").write_text(plugins)


def test_packages_that_compute_count_with_their_versions(site: Path) -> None:
    assert computing_packages(["listed"], PLUGINS) == "none"
    install(site, "Listed", "2.0")
    install(site, "new-attention")
    install(site, "uses-torch", more="Requires-Dist: numpy\nRequires-Dist: torch>=2; python_version > '3'\n")
    install(site, "models", plugins="[engine.general_plugins]\na = b:c\n")
    install(site, "tracing", plugins="[other.plugins]\na = b:c\n")
    install(site, "may-use-torch", more="Requires-Dist: torch; extra == 'gpu'\nRequires-Dist: torch-other\n")
    install(site, "xgrammar", more="Requires-Dist: torch\n")
    assert computing_packages(["listed"], PLUGINS) == "listed 2.0, models 1.0, new-attention 1.0, uses-torch 1.0"


def test_a_package_that_was_installed_without_a_folder_counts_with_its_version(site: Path) -> None:
    (site / "deep_gemm-2.1-py3.11.egg-info").write_text("Metadata-Version: 2.1\nName: deep-gemm\nVersion: 2.1\n")
    assert computing_packages(["deep-gemm"], PLUGINS) == "deep-gemm 2.1"


def test_both_of_two_installations_count(site: Path) -> None:
    install(site, "deep-gemm", "2.1")
    install(site, "deep_gemm", "2.0")
    assert computing_packages(["deep-gemm"], PLUGINS) == "deep-gemm 2.0 2.1"


def test_damaged_metadata_is_no_error(site: Path) -> None:
    (site / "without-1.0.dist-info").mkdir()
    (site / "damaged-1.0.dist-info").mkdir()
    (site / "damaged-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe")
    install(site, "listed")
    assert computing_packages(["listed", "without", "damaged"], PLUGINS) == "listed 1.0"


def test_a_module_without_a_package_counts(site: Path) -> None:
    (site / "deep_gemm").mkdir()
    assert computing_packages(["deep-gemm"], PLUGINS) == "none"
    (site / "deep_gemm" / "__init__.py").touch()
    assert computing_packages(["deep-gemm"], PLUGINS) == "deep-gemm of no known version"
