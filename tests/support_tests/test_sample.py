"""What a sample of the slow tests has, as `.ci/run` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INTEGRATIONS = Path(__file__).parents[1] / "integrations"


def test_a_sample_restarts_lmcache_s_server() -> None:
    files = [str(INTEGRATIONS / name) for name in ("test_lmcache.py", "test_sglang_engine.py", "test_sglang_pools.py")]
    options = ["--collect-only", "-q", "--one-in", "20", "-m", "slow", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert "test_a_server_that_was_killed_finds_and_verifies_everything[1]" in names
    assert "test_pages_of_every_host_pool_come_back" in names
    assert "test_a_full_disk_costs_hits_only" not in names  # it is marked `full`
