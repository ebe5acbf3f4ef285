"""The command `tiered-kv serve`: what it says of itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tiered_kv
from tests.support.host_server import WAIT_S, stack_of
from tiered_kv.cli.main import main


def test_a_server_logs_what_it_serves_and_why_it_ends(tmp_path: Path) -> None:
    tiers = [{"type": "memory", "capacity": "3MiB"}, {"type": "fs", "path": str(tmp_path / "fs"), "capacity": "64MiB"}]
    stack, path = tmp_path / "stack.yaml", tmp_path / "cache.sock"
    stack.write_text(json.dumps(stack_of(secondary=tiers)))
    command = [sys.executable, "-m", "tiered_kv", "serve", str(stack), "--socket", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=WAIT_S)
    for said in (f"tiered-kv {tiered_kv.__version__}, process {process.pid}", str(stack), f"attach at unix:{path}"):
        assert said in log
    assert "cpu 1MiB, memory 3MiB, fs 64MiB" in log
    assert "has ended: SIGTERM" in log
    assert not path.exists()


def test_a_server_that_cannot_open_its_stack_logs_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stack.yaml").write_text(json.dumps(stack_of(secondary=[{"type": "fs", "path": "/proc/none"}])))
    caplog.set_level("INFO")
    monkeypatch.setattr("tiered_kv.cli.serve.raise_limit", lambda: None)
    assert main(["serve", str(tmp_path / "stack.yaml"), "--socket", str(tmp_path / "cache.sock")]) == 2
    assert "has ended: ConfigError" in caplog.text
