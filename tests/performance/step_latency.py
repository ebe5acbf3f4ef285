"""Time of a scheduler step of 512 lookups, idle and while the tiers are saturated: one JSON object.

    python tests/performance/step_latency.py DIRECTORY --steps 2000

The stack is CPU memory over an nvme tier in DIRECTORY. A step is 512 calls of `lookup`, half of them hits in the
primary tier and half misses everywhere, and `on_schedule_end`. Between steps the thread sleeps, as a scheduler waits
for its model, and before every step new blocks are stored and evicted ones are asked for, untimed, so that the tier has
stores and loads in flight from the beginning of the step to its end (both are counted).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tiered_kv
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.tiering.manager import TieringOffloadingManager

LOOKUPS = 512
BLOCK_BYTES = 64 << 10
PRIMARY_BLOCKS = 8192
BATCH = 32
BATCHES = 8
"""Batches stored, and asked for, before each step: more than the tier moves between two."""
MODEL_STEP_S = 0.005


def make_key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Traffic:
    """Keeps a manager's tiers busy: stores a batch of new blocks, and begins to promote a batch of evicted ones."""

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self._manager = manager
        self._stored = 0
        self._loaded = 0

    def feed(self) -> None:
        for _ in range(BATCHES):
            self._store()
            if self._loaded < self._stored - 2 * PRIMARY_BLOCKS:
                self._load()
        self._manager.on_schedule_end()  # submits the loads

    def _store(self) -> None:
        context = ReqContext(f"store-{self._stored}")
        output = self._manager.prepare_store([make_key(self._stored + i) for i in range(BATCH)], context)
        if output is not None:
            self._manager.complete_store(output.keys_to_store, context)
            self._stored += BATCH
        self._manager.on_request_finished(context)

    def _load(self) -> None:
        context = ReqContext(f"load-{self._loaded}")
        self._manager.lookup_many([make_key(self._loaded + i) for i in range(BATCH)], context)
        self._manager.on_request_finished(context)  # so that what arrives is not held for anybody
        self._loaded += BATCH


def measure_steps(manager: TieringOffloadingManager, steps: int, before: Callable[[], None]) -> list[float]:
    """Return the microseconds of each step."""
    resident = [make_key((1 << 40) + i) for i in range(LOOKUPS // 2)]
    absent = [make_key((1 << 41) + i) for i in range(LOOKUPS // 2)]
    owner = ReqContext("resident")
    output = manager.prepare_store(resident, owner)
    assert output is not None
    manager.complete_store(output.keys_to_store, owner)
    manager.drain_jobs(60)
    manager.prepare_load(resident, owner)  # pinned: no traffic evicts them
    wanted = [key for pair in zip(resident, absent, strict=True) for key in pair]
    times = []
    for number in range(steps):
        time.sleep(MODEL_STEP_S)
        before()
        context = ReqContext(f"step-{number}")
        start = time.perf_counter()
        lookup = manager.lookup
        for key in wanted:
            lookup(key, context)
        manager.on_schedule_end()
        times.append((time.perf_counter() - start) * 1e6)
        manager.on_request_finished(context)
    manager.complete_load(resident, owner)
    manager.on_request_finished(owner)
    return times


def measure(directory: str, steps: int) -> dict[str, object]:
    """Return the percentiles of both, and what went on meanwhile."""
    with tempfile.TemporaryDirectory(dir=directory) as path:
        config = {
            "version": 1,
            "namespace": {"model": "step-latency"},
            "block": {"bytes": BLOCK_BYTES, "tokens": 16},
            "primary": {"capacity": PRIMARY_BLOCKS * BLOCK_BYTES},
            "secondary": [{"type": "nvme", "path": str(Path(path) / "nvme"), "capacity": "4GiB"}],
        }
        with tiered_kv.open_stack(config) as stack:
            idle = measure_steps(stack.manager, steps, lambda: None)
            traffic = Traffic(stack.manager)
            for _ in range(4 * PRIMARY_BLOCKS // BATCH // BATCHES):  # until there is something to load
                traffic.feed()
                stack.manager.drain_jobs(60)
            busy_in_flight = []

            def feed() -> None:
                traffic.feed()
                busy_in_flight.append(stack.manager.jobs_in_flight)

            busy = measure_steps(stack.manager, steps, feed)
            counters = stack.manager.counters()["nvme"]
            stack.manager.drain_jobs(60)
    return {
        "idle_step_us": percentiles(idle),
        "busy_step_us": percentiles(busy),
        "busy_over_idle_p99": round(percentiles(busy)["p99"] / percentiles(idle)["p99"], 2),
        "jobs_in_flight_median": statistics.median(busy_in_flight),
        "nvme_stored_blocks": counters.get("stored_blocks_total", 0),
        "nvme_loaded_blocks": counters.get("loaded_blocks_total", 0),
    }


def percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50": round(ordered[len(ordered) // 2], 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "max": round(ordered[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.directory, arguments.steps)))


if __name__ == "__main__":
    main()
