"""Time of a scheduler step, idle and beside a saturated tier, for each built-in tier in turn: one JSON object.

    python tests/performance/step_latency.py DIRECTORY --rounds 5
    python tests/performance/step_latency.py DIRECTORY --tiers memory nvme

A step is 512 calls of `lookup`, half of them hits in the primary tier and half misses everywhere, `prepare_store` of
512 new keys, `complete_store` of 32 of them and, as failed, of the others, and `on_schedule_end`. Between steps the
thread sleeps, as a scheduler waits for its model. An idle step begins when every transfer has ended. Before a busy step
new blocks are stored and evicted ones are asked for, untimed, so that the tier has stores and loads in flight from the
step's beginning to its end; `jobs` is the median number of jobs in flight. A step's time leaves out what its thread
stood ready in the run queue (Linux, schedstat), which other programs cause.

Idle and busy phases alternate, `--steps` of each a round. A row gives medians over the rounds: of the percentiles, in
microseconds, and of the ratio of both 99th percentiles within a round, with its lowest and highest. Redis and S3 are a
`redis-server` and nginx on loopback, which compete for the processor too. DIRECTORY holds what is stored.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiered_kv
from tests.performance.bench import block_key, command_line, ratios, spread
from tests.performance.s3_rates import start_nginx
from tests.support.entries import s3_entry
from tests.support.redis_servers import RedisServer
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.manager import TieringOffloadingManager

KEYS = 512
PRIMARY_BYTES = 256 << 20
BLOCK_BYTES = 64 << 10
BATCH = 32
BATCHES = 8
"""Batches stored before each busy step, at most; twice as many are asked for at a time."""
JOBS_MAX = 30
"""Nothing is stored beyond these jobs in flight. A tier accepts 32 such stores: a quarter of the primary tier."""
MODEL_STEP_S = 0.005
TIERS = ("memory", "nvme", "fs", "redis", "s3")


@contextmanager
def tier_settings(tier: str, folder: Path) -> Iterator[dict[str, object]]:
    """Yield the stack file's entry of a tier, with the server that it needs."""
    if tier == "memory":
        yield {"type": tier, "capacity": "1GiB"}
    elif tier in ("nvme", "fs"):
        yield {"type": tier, "path": str(folder / tier), "capacity": "4GiB"}
    elif tier == "redis":
        with RedisServer(folder, ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")) as redis:
            yield {"type": tier, "url": redis.url}
    else:
        nginx = start_nginx(folder)
        try:
            yield s3_entry(nginx, "steps")
        finally:
            nginx.stop()


class Steps:
    """A scheduler's steps over one stack."""

    def __init__(self, manager: TieringOffloadingManager, primary_blocks: int) -> None:
        self._manager = manager
        self._primary_blocks = primary_blocks
        self._numbers = iter(range(1 << 40))
        self._stored = self._asked = 0
        self._asking: deque[tuple[ReqContext, list[OffloadKey]]] = deque()
        resident = [block_key((1 << 40) + i) for i in range(KEYS // 2)]
        absent = [block_key((1 << 41) + i) for i in range(KEYS // 2)]
        owner = ReqContext("resident")
        output = manager.prepare_store(resident, owner)
        assert output is not None
        manager.complete_store(output.keys_to_store, owner)
        manager.drain_jobs(60)
        manager.prepare_load(resident, owner)  # pinned: no traffic evicts them
        self._buffer = ctypes.create_string_buffer(128)
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._wanted = [key for pair in zip(resident, absent, strict=True) for key in pair]

    def idle(self, steps: int) -> list[float]:
        """Return the microseconds of steps that begin when nothing is in flight."""
        return [self._step(lambda: self._manager.drain_jobs(60)) for _ in range(steps)]

    def busy(self, steps: int) -> tuple[list[float], list[int]]:
        """Return the microseconds of steps beside transfers, and how many jobs were in flight before each."""
        times, jobs = [], []

        def feed() -> None:
            self.feed()
            jobs.append(self._manager.jobs_in_flight)

        for _ in range(steps):
            times.append(self._step(feed))
        return times, jobs

    def feed(self) -> None:
        """Store new blocks, and ask for evicted ones until each is promoted or a miss."""
        self._manager.poll()  # what has ended since the last step makes room
        for _ in range(BATCHES):
            if self._manager.jobs_in_flight >= JOBS_MAX:
                break
            context = ReqContext(f"store-{self._stored}")
            output = self._manager.prepare_store([block_key(self._stored + i) for i in range(BATCH)], context)
            if output is not None:
                self._manager.complete_store(output.keys_to_store, context)
                self._stored += BATCH
            self._manager.on_request_finished(context)
        for _ in range(len(self._asking)):
            context, keys = self._asking.popleft()
            if None in self._manager.lookup_many(keys, context):
                self._asking.append((context, keys))
            else:
                self._manager.on_request_finished(context)  # so that loaded blocks are not held for it
        evicted = self._stored - 2 * self._primary_blocks  # the primary tier has no block before it
        self._asked = max(self._asked, evicted - self._primary_blocks)  # a full tier may have evicted those before
        while len(self._asking) < 2 * BATCHES and self._asked < evicted:
            context, keys = ReqContext(f"load-{self._asked}"), [block_key(self._asked + i) for i in range(BATCH)]
            self._manager.lookup_many(keys, context)
            self._asking.append((context, keys))
            self._asked += BATCH
        self._manager.on_schedule_end()  # submits the loads

    def _processor_wait_s(self) -> float:
        """Return for how long this thread has been ready to run and had no processor."""
        # `os.pread` would release the interpreter's lock, and what a worker did with it would count as this thread's.
        size = ctypes.pythonapi.pread(self._schedstat, self._buffer, len(self._buffer), 0)
        return int(self._buffer.raw[:size].split()[1]) / 1e9

    def _step(self, before: Callable[[], object]) -> float:
        time.sleep(MODEL_STEP_S)
        before()
        manager, context = self._manager, ReqContext(f"step-{next(self._numbers)}")
        new = [block_key(self._stored + i) for i in range(KEYS)]
        start = time.perf_counter() - self._processor_wait_s()
        lookup = manager.lookup
        for key in self._wanted:
            lookup(key, context)
        output = manager.prepare_store(new, context)
        if output is not None:
            manager.complete_store(new[:BATCH], context)
            manager.complete_store(new[BATCH:], context, success=False)
            self._stored += BATCH
        manager.on_schedule_end()
        microseconds = (time.perf_counter() - self._processor_wait_s() - start) * 1e6
        manager.on_request_finished(context)
        return microseconds


def measure(directory: Path, tier: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return what steps take over one tier, idle and busy."""
    idle: list[dict[str, float]] = []
    busy: list[dict[str, float]] = []
    jobs: list[int] = []
    with tempfile.TemporaryDirectory(dir=directory) as folder, tier_settings(tier, Path(folder)) as settings:
        config = {
            "version": 1,
            "namespace": {"model": "step-latency"},
            "block": {"bytes": BLOCK_BYTES, "tokens": 16},
            "primary": {"capacity": PRIMARY_BYTES},
            "secondary": [settings],
        }
        with tiered_kv.open_engine_stack(config) as stack:
            gc.collect()
            gc.freeze()  # as docs/explanation/performance.md advises programs
            scheduler = Steps(stack.manager, PRIMARY_BYTES // BLOCK_BYTES)
            for _ in range(3 * PRIMARY_BYTES // BLOCK_BYTES // BATCH // BATCHES):  # until there is something to load
                scheduler.feed()
                stack.manager.drain_jobs(60)
            for _ in range(rounds):
                idle.append(percentiles(scheduler.idle(steps)))
                times, in_flight = scheduler.busy(steps)
                busy.append(percentiles(times))
                jobs += in_flight
                stack.manager.drain_jobs(60)
            counters = stack.manager.counters()[str(settings["type"])]
    return {
        "idle_step_us": {name: round(statistics.median(each[name] for each in idle)) for name in idle[0]},
        "busy_step_us": {name: round(statistics.median(each[name] for each in busy)) for name in busy[0]},
        "busy_over_idle_p99": spread(ratios([each["p99"] for each in busy], [each["p99"] for each in idle])),
        "jobs_in_flight_median": statistics.median(jobs),
        **{name: counters.get(name, 0) for name in ("stored_blocks_total", "loaded_blocks_total")},
    }


def percentiles(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "max": ordered[-1]}


def main() -> None:
    parser = command_line(__doc__, "directory", steps=300, rounds=5)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    arguments = parser.parse_args()
    counts = (arguments.steps, arguments.rounds)
    print(json.dumps({tier: measure(arguments.directory, tier, *counts) for tier in arguments.tiers}))


if __name__ == "__main__":
    main()
