"""A replay that is killed at random moments: what is found afterwards is right, and never too much.

By default the sizes suit continuous integration. TIERED_KV_FULL_SIZE=1 uses blocks of 64 KiB, 256 MiB of memory and a
disk tier of 4 GiB, which takes a quarter of an hour.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import tiered_kv
from tests.support.disk_use import occupied_bytes
from tiered_kv.base import ReqContext
from tiered_kv.counters import count_of
from tiered_kv.workload.content import BlockContent
from tiered_kv.workload.generator import ChatWorkload
from tiered_kv.workload.request import block_key
from tiered_kv.workload.trace import read_trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
COMMAND = [sys.executable, "-c", "import sys; from tiered_kv.cli import main; sys.exit(main())", "replay"]
KILLS = 20
SEED = 20
SAMPLE_S = 0.005
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Size:
    """How large a replay is, and for how long it may run before it is killed."""

    block_bytes: int
    primary_bytes: int
    capacity_bytes: int
    requests: int
    run_max_s: float


SMALL = Size(16 << 10, 16 << 20, 96 << 20, 3000, 1.5)
FULL = Size(64 << 10, 256 << 20, 4 << 30, 3000, 40.0)
SIZE = FULL if os.environ.get("TIERED_KV_FULL_SIZE") else SMALL


@dataclass(frozen=True, slots=True)
class Workload:
    """Arguments of the command, and the ids of all blocks that it may store."""

    arguments: list[str]
    block_ids: list[int]


@pytest.fixture(scope="module", params=["trace", "chats"])
def workload(request: pytest.FixtureRequest) -> Workload:
    if request.param == "chats":
        requests = ChatWorkload().requests()
        arguments = []
    elif TRACE.exists():
        requests = read_trace(TRACE, requests_max=SIZE.requests)
        arguments = ["--trace", str(TRACE), "--requests", str(SIZE.requests)]
    else:
        pytest.skip(f"there is no {TRACE}")
    return Workload(arguments, list(dict.fromkeys(i for one in requests for i in one.hash_ids)))


class StackDirectory:
    """A stack's file and its nvme directory, with an eye on how much the latter occupies."""

    def __init__(self, path: Path) -> None:
        self.data = path / "kv"
        self.file = path / "stack.yaml"
        self.file.write_text(
            json.dumps(
                {
                    "version": 1,
                    "namespace": {"model": "crash", "revision": "1", "dtype": "bfloat16"},
                    "block": {"bytes": SIZE.block_bytes, "tokens": 512},
                    "primary": {"capacity": SIZE.primary_bytes},
                    "secondary": [{"type": "nvme", "path": str(self.data), "capacity": SIZE.capacity_bytes}],
                }
            )
        )
        self.peak_bytes = 0

    def sample(self) -> None:
        """Note what `du` says of the directory now, and that it is within the capacity."""
        occupied = occupied_bytes(self.data)
        self.peak_bytes = max(self.peak_bytes, occupied)
        assert occupied <= SIZE.capacity_bytes, f"{occupied} bytes are occupied, of {SIZE.capacity_bytes}"

    @contextmanager
    def replay(self, workload: Workload) -> Iterator[subprocess.Popen[str]]:
        """Run the command; it is killed at the end of the block if it still runs."""
        command = [*COMMAND, str(self.file), "--json", *workload.arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()
                process.communicate()

    def verify(self, workload: Workload) -> int:
        """Open the stack, load every block that it says it has, compare each byte; return how many there were."""
        content = BlockContent(SIZE.block_bytes)
        batch = 64
        out = np.empty((batch, SIZE.block_bytes), dtype=np.uint8)
        loaded = 0
        with tiered_kv.open_stack(self.file) as stack:
            keys = [block_key(block_id) for block_id in workload.block_ids]
            answers = stack.secondary_tiers[0].lookup_many(keys, ReqContext("verify"))
            found = [block_id for block_id, answer in zip(workload.block_ids, answers, strict=True) if answer]
            for first in range(0, len(found), batch):
                ids = found[first : first + batch]
                count = stack.get([block_key(block_id) for block_id in ids], out[: len(ids)], timeout=WAIT_S)
                assert content.check(out, range(count), ids[:count]) == []
                loaded += count
            self.sample()
            counters = stack.counters()["nvme"]
        assert count_of(counters, "tier", "corrupt_blocks_total") == 0, "the index names blocks that are not whole"
        return loaded


@pytest.mark.slow
def test_a_replay_that_is_killed_twenty_times_never_loads_a_corrupt_block(workload: Workload, tmp_path: Path) -> None:
    directory = StackDirectory(tmp_path)
    moments = random.Random(SEED)
    found: list[int] = []
    end_s = time.monotonic() + WAIT_S
    # More often where a machine is so slow that these came to too little for the test to mean anything.
    while len(found) < KILLS or (directory.peak_bytes <= SIZE.capacity_bytes // 4 and time.monotonic() < end_s):
        run_s = moments.uniform(0.05, 1.0) * SIZE.run_max_s
        with directory.replay(workload) as process:
            _watch_until_it_works(directory, process)
            end = time.monotonic() + run_s
            while time.monotonic() < end and process.poll() is None:
                directory.sample()
                time.sleep(SAMPLE_S)
            process.send_signal(signal.SIGKILL)
        directory.sample()
        found.append(directory.verify(workload))
    assert found[-1] > 0, found
    assert directory.peak_bytes > SIZE.capacity_bytes // 4, f"{len(found)} runs wrote too little to mean anything"


@pytest.mark.slow
def test_a_second_replay_hits_what_the_first_has_left(workload: Workload, tmp_path: Path) -> None:
    directory = StackDirectory(tmp_path)
    reports = []
    for _ in range(2):
        with directory.replay(workload) as process:
            while process.poll() is None:
                directory.sample()
                time.sleep(SAMPLE_S)
            output, errors = process.communicate()
        assert process.returncode == 0, errors
        reports.append(json.loads(output))
    first, second = reports
    assert first["corrupt_blocks"] == second["corrupt_blocks"] == 0
    assert first["verified_blocks"] > 0
    assert second["hits"]["nvme"] > 0


def _watch_until_it_works(directory: StackDirectory, process: subprocess.Popen[str]) -> None:
    """Return once the command has opened its directory, so that no kill is spent on the interpreter's start."""
    before = {path: path.stat().st_mtime_ns for path in directory.data.rglob("*")} if directory.data.exists() else {}
    end = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < end:
        now = {path: _mtime_ns(path) for path in directory.data.rglob("*")} if directory.data.exists() else {}
        if now != before:
            return
        time.sleep(SAMPLE_S)


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
