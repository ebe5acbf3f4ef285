"""Without SGLang, or with one that was not tested, importing the integration says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRY = """
from tiered_kv.errors import ConfigError
try:
    import tiered_kv.integrations.sglang as integration
except ConfigError as error:
    print(error)
else:
    print("imported", integration.SGLANG_VERSION)
"""


def import_with(tmp_path: Path, version: str | None, **variables: str) -> str:
    """Return what comes of importing the integration where a module calls itself SGLang `version`, or none does."""
    path = tmp_path / "sglang.py"
    path.write_text("raise ModuleNotFoundError(name='sglang')" if version is None else f"__version__ = {version!r}")
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **variables, "PYTHONPATH": search}
    command = [sys.executable, "-c", TRY]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    return done.stdout.strip()


def test_without_sglang_the_error_says_which_is_tested(tmp_path: Path) -> None:
    message = import_with(tmp_path, None)
    assert "needs SGLang (0.5.23 is tested), and it is not installed here" in message


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cpu"])
def test_the_tested_version_is_taken(tmp_path: Path, version: str) -> None:
    assert import_with(tmp_path, version) == f"imported {version}"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.dev3", "0.5.23.post1", "0.5.24", "0.6.0", "dev"])
def test_an_untested_version_is_a_clear_error(tmp_path: Path, version: str) -> None:
    message = import_with(tmp_path, version)
    assert message.startswith(f"SGLang {version} is installed")
    assert "TIERED_KV_ANY_SGLANG=1" in message
    assert import_with(tmp_path, version, TIERED_KV_ANY_SGLANG="1") == f"imported {version}"
