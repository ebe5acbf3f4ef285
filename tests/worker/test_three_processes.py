"""A scheduler and two workers as three real processes: what was stored comes back byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

PART = Path(__file__).parent / "engine_part.py"
NUM_WORKERS = 2
FACTOR = 2
BATCH = 4
NUM_BLOCKS = 40
PRIMARY_BLOCKS = 16


class Part:
    """One process of the engine."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PART), role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def ask(self, *command: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def call(self, *command: object) -> Any:
        self.ask(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            pass


class Engine:
    """The three processes, started in `order` as engines differ in it."""

    def __init__(self, directory: Path, order: Sequence[str]) -> None:
        settings = {
            "name": f"tiered-kv-test-{uuid.uuid4().hex}",
            "num_workers": NUM_WORKERS,
            "stack": {
                "namespace": {"model": "test", "parallel": {"tensor": NUM_WORKERS}},
                "block": {"bytes": 8192, "tokens": 32},
                "primary": {"capacity": PRIMARY_BLOCKS * 8192},
                "secondary": [{"type": "nvme", "path": str(directory), "capacity": "64MiB"}],
            },
        }
        self._exit = ExitStack()
        parts = {}
        for role in order:
            parts[role] = Part(role, settings)
            self._exit.callback(parts[role].kill)
        with self._exit:
            for part in parts.values():
                assert part.answer() == "ready"
            self._exit = self._exit.pop_all()
        self.scheduler = parts.pop("scheduler")
        self.workers = [parts[str(rank)] for rank in range(NUM_WORKERS)]

    def kill(self) -> None:
        self._exit.close()

    def close(self) -> None:
        for part in [*self.workers, self.scheduler]:
            assert part.call("close") is None
            assert part.process.wait(120) == 0
        self.kill()

    def on_all_workers(self, *command: object) -> list[Any]:
        for worker in self.workers:
            worker.ask(*command)
        return [worker.answer() for worker in self.workers]

    def store(self, numbers: list[int], gpu_blocks: list[int]) -> None:
        rows = self.scheduler.call("prepare_store", numbers)
        assert rows is not None
        self.on_all_workers("compute", numbers, gpu_blocks)
        assert self.on_all_workers("store", gpu_blocks, rows) == [True] * NUM_WORKERS
        assert self.scheduler.call("complete_store", numbers)

    def load_and_check(self, numbers: list[int], gpu_blocks: list[int]) -> None:
        rows = self.scheduler.call("prepare_load", numbers)
        assert rows is not None, "no block was lost"
        assert self.on_all_workers("load", rows, gpu_blocks) == [True] * NUM_WORKERS
        self.scheduler.call("complete_load", numbers)
        assert self.on_all_workers("check", numbers, gpu_blocks) == [[]] * NUM_WORKERS


def batches() -> list[list[int]]:
    return [list(range(first, first + BATCH)) for first in range(0, NUM_BLOCKS, BATCH)]


@pytest.mark.slow
def test_blocks_survive_eviction_and_a_kill_of_every_process(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ["0", "1", "scheduler"])  # workers first, as vLLM starts them
    try:
        for numbers in batches():
            engine.store(numbers, gpu_blocks=[3, 4, 9, 8, 0, 1, 14, 15])
        counters = engine.scheduler.call("counters")
        assert counters["cpu"]["evicted_blocks_total"] >= NUM_BLOCKS - PRIMARY_BLOCKS
        for numbers in batches():
            engine.load_and_check(numbers, gpu_blocks=[7, 6, 5, 4, 3, 2, 1, 0])
        assert engine.scheduler.call("counters")["nvme"]["loaded_blocks_total"] >= NUM_BLOCKS - PRIMARY_BLOCKS
    finally:
        engine.kill()

    engine = Engine(tmp_path, ["scheduler", "1", "0"])
    try:
        for numbers in reversed(batches()):
            engine.load_and_check(numbers, gpu_blocks=[0, 1, 2, 3, 12, 13, 14, 15])
        counters = engine.scheduler.call("counters")
        assert counters["nvme"]["loaded_blocks_total"] == NUM_BLOCKS, "the primary tier began empty"
        engine.close()
    finally:
        engine.kill()
