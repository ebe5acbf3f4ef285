"""The example of four tiers under a replay, with real servers: each tier has hits."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import shown
from tiered_kv.testing.servers import free_port

ROOT = Path(__file__).parents[2]
TIERS = ("cpu", "nvme", "redis", "s3")
WAIT_S = 300.0


@pytest.mark.slow
def test_the_commands_in_the_quickstart_have_hits_in_each_of_the_four_tiers(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    path = f"{scripts}:{os.environ['PATH']}"
    missing = [
        name for name in ("redis-server", "moto_server", "tiered-kv", "curl") if shutil.which(name, path=path) is None
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    commands = shown("tutorial/quickstart.md")["all tiers"]
    for name, ours in (("6379", str(free_port())), ("9000", str(free_port())), ("examples/", f"{ROOT}/examples/")):
        commands = commands.replace(name, ours)
    with subprocess.Popen(
        ["bash", "-e", "-c", commands + "wait\n"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the servers too, if it did not come to its end
    assert re.search(r"^ *corrupt_blocks +0 *$", output, re.MULTILINE), output + errors
    assert all(re.search(rf"^ {name} +[1-9]", output, re.MULTILINE) for name in TIERS), output
