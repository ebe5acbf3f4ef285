"""Without vLLM, or with one that was not tested, importing the integration says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRY = """
from tiered_kv.errors import ConfigError
try:
    import tiered_kv.integrations.vllm as integration
except ConfigError as error:
    print(error)
else:
    print("imported", integration.VLLM_VERSION)
"""


def import_with(tmp_path: Path, version: str | None, **variables: str) -> str:
    """Return what comes of importing the integration where a module calls itself vLLM `version`, or none does."""
    path = tmp_path / "vllm.py"
    path.write_text("raise ModuleNotFoundError(name='vllm')" if version is None else f"__version__ = {version!r}")
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **variables, "PYTHONPATH": search}
    command = [sys.executable, "-c", TRY]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    return done.stdout.strip()


def test_without_vllm_the_error_says_which_are_tested(tmp_path: Path) -> None:
    message = import_with(tmp_path, None)
    assert "needs vLLM (0.32.0 and 0.33.0 are tested), and it is not installed here" in message


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1"])
def test_tested_versions_and_their_patches_are_taken(tmp_path: Path, version: str) -> None:
    assert import_with(tmp_path, version) == f"imported {version}"


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev"])
def test_an_untested_version_is_a_clear_error(tmp_path: Path, version: str) -> None:
    message = import_with(tmp_path, version)
    assert message.startswith(f"vLLM {version} is installed")
    assert "TIERED_KV_ANY_VLLM=1" in message
    assert import_with(tmp_path, version, TIERED_KV_ANY_VLLM="1") == f"imported {version}"
