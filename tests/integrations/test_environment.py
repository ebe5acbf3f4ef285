"""Which variables of the environment, and which packages, are part of an engine's namespace."""

from __future__ import annotations

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
    ],
)
def test_what_kubernetes_sets_for_a_service_does_not_count(name: str) -> None:
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
