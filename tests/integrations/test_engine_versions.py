"""Without an engine, or with one that was not tested, importing its integration says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.children import output_with_engine

TRY = """
import importlib, sys
from tiered_kv.errors import ConfigError
try:
    integration = importlib.import_module("tiered_kv.integrations." + sys.argv[1])
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
