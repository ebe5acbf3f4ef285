"""`tiered-kv serve` begins with the hottest blocks of the server before it, or of another one, in its memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.host_server import BLOCK_BYTES, WAIT_S, Engine, keys_of, stack_of
from tests.support.server_process import free_port
from tiered_kv.base import OffloadKey
from tiered_kv.testing.control import wait_until

KEYS = keys_of(24)


@contextmanager
def server(directory: Path, *options: str, rows: int = 64, policy: str = "lru", name: str = "cache") -> Iterator[Any]:
    """Serve at `directory`/NAME.sock in a process; yield it, its address, and a function that returns its counters."""
    port = free_port()
    stack = stack_of(
        rows,
        secondary=[{"type": "fs", "path": str(directory / "shared"), "capacity": "64MiB"}],
        metrics={"listen": f"127.0.0.1:{port}"},
    )
    stack["primary"] = {"capacity": rows * BLOCK_BYTES, "policy": policy}
    file, socket = directory / f"{name}.yaml", directory / f"{name}.sock"
    file.write_text(json.dumps(stack))
    command = [sys.executable, "-m", "tiered_kv", "serve", str(file), "--socket", str(socket), *options]

    def counters(tier: str = "cpu") -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{port}/status", timeout=WAIT_S) as answer:
            found: dict[str, Any] = {each["name"]: each for each in json.load(answer)["tiers"]}[tier]["counters"]
            return found

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            yield process, f"unix:{socket}", counters, f"127.0.0.1:{port}"
        finally:
            process.kill()


def fill(address: str, counters: Any, keys: list[OffloadKey] = KEYS) -> None:
    with closing(Engine(address, "engine")) as engine:
        for first in range(0, len(keys), 8):  # an engine, and the tier's stores, have a quarter of the rows
            part = keys[first : first + 8]
            least = counters("fs")["stored_blocks_total"] + len(part)
            assert engine.store(part) == part
            while counters("fs")["stored_blocks_total"] < least:
                time.sleep(0.01)


def ended(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    process.send_signal(number)
    return process.communicate(timeout=WAIT_S)[1]


def has_warmed(listener: str) -> bool:
    with urlopen(f"http://{listener}/status", timeout=WAIT_S) as answer:
        return b"warm start ended" in answer.read()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc", "density"])
def test_a_planned_restart_has_the_memory_of_the_server_before(tmp_path: Path, policy: str) -> None:
    with server(tmp_path, policy=policy) as (process, address, counters, _):
        fill(address, counters)
        ended(process)
    with server(tmp_path, policy=policy) as (process, address, counters, listener):
        wait_until(lambda: has_warmed(listener), WAIT_S)  # it pauses after its last part, too
        assert counters()["warmed_blocks_total"] == {"loaded": len(KEYS)}
        with closing(Engine(address, "engine")) as engine:
            assert engine.load(KEYS) == len(KEYS)
        wait_until(lambda: counters()["blocks_total"].get("hit") == len(KEYS), WAIT_S)
        assert counters("fs")["blocks_total"].get("hit", 0) == 0
        assert f"the warm start has loaded {len(KEYS)} of {len(KEYS)} blocks" in ended(process)


@pytest.mark.slow
def test_a_killed_server_leaves_an_older_list(tmp_path: Path) -> None:
    with server(tmp_path) as (process, address, counters, _):
        fill(address, counters, KEYS[:8])
        ended(process)
    with server(tmp_path) as (process, address, counters, _):
        wait_until(lambda: counters().get("warmed_blocks_total", {}).get("loaded") == 8, WAIT_S)
        fill(address, counters, KEYS[8:])
        ended(process, signal.SIGKILL)
    with server(tmp_path) as (process, address, counters, _):
        wait_until(lambda: counters().get("warmed_blocks_total", {}).get("loaded") == 8, WAIT_S)
        with closing(Engine(address, "engine")) as engine:
            assert engine.load(KEYS) == len(KEYS)


@pytest.mark.slow
def test_a_new_server_takes_the_memory_of_one_that_runs(tmp_path: Path) -> None:
    with server(tmp_path) as (_, address, counters, listener):
        fill(address, counters)
        with server(tmp_path, "--warm-from", listener, rows=16, name="new") as (process, _, of_new, _):
            wait_until(
                lambda: of_new().get("warmed_blocks_total", {}).get("refused", 0) > 0 or of_new()["used_blocks"] == 16
            )
            assert of_new()["used_blocks"] == 16, "the hottest that fit"
            assert of_new()["evicted_blocks_total"] == 0
            ended(process)
        with server(tmp_path, "--warm-rate", "0", name="none") as (process, _, of_cold, _):
            assert of_cold()["used_blocks"] == 0
            ended(process)
