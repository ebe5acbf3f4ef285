"""A host's cache beside a stack of the engine's own process, and an engine's steps beside it: one JSON object.

    python tests/performance/host_rates.py DIRECTORY --rounds 3
    python tests/performance/host_rates.py DIRECTORY --tiers nvme redis

Rates: a program puts 256 blocks at a time, waits until the tier has them, and gets all back. The primary tier has room
for a quarter, so they come from the tier. It uses `tiered-kv serve` and stacks of its own in turn, one of them without
huge pages, as a server's memory is by default. Every block is compared.

Steps: an attached engine sends the 512 keys of a new request, looks up those of the last one, of which half are stored
and half nowhere, stores 32 blocks, and ends its step. Between steps it sleeps, as while its model runs. In a busy phase
another process puts and gets without a pause, so that the server and its tier have work all the time. A step's time
leaves out what its thread stood ready in the run queue (Linux, schedstat). GB = 1e9 bytes.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import tiered_kv
from tests.performance.bench import Sample, block_key, command_line, in_turn, ratios, sample, spread, summary, timed
from tests.performance.host_cache import attached, store
from tests.performance.step_latency import BLOCK_BYTES, MODEL_STEP_S, percentiles, tier_settings
from tests.support.host_server import server_process
from tiered_kv.base import ReqContext
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.connect import HostStack, connect
from tiered_kv.stack.open import Stack

TIERS = ("nvme", "redis", "s3")
BLOCKS, PRIMARY_BLOCKS, BATCH = 4096, 1024, 256
KEYS, STORED = 512, 32
_numbers = itertools.count()


def main() -> None:
    parser = command_line(__doc__, "directory", rounds=3, steps=300, blocks=BLOCKS)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    arguments = parser.parse_args()
    if str(arguments.directory).startswith("unix:"):  # the other process of a busy phase
        feed(str(arguments.directory))
    counts = (arguments.rounds, arguments.steps, arguments.blocks)
    print(json.dumps({tier: measure(arguments.directory, tier, *counts) for tier in arguments.tiers}))


def measure(directory: Path, tier: str, rounds: int, steps: int, blocks: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=directory) as folder, tier_settings(tier, Path(folder)) as entry:
        own, host = stack_of(entry, "own"), stack_of(entry, "host")
        small = stack_of(entry, "own_small_pages", huge_pages=False)
        with server_process(Path(folder), host):
            address = f"unix:{folder}/cache.sock"
            rates: defaultdict[str, list[Sample]] = defaultdict(list)
            with (
                connect(address) as attached_stack,
                tiered_kv.open_stack(own) as stack,
                tiered_kv.open_stack(small) as small_pages,
            ):
                sides: dict[str, Stack | HostStack] = {
                    "host": attached_stack,
                    "own": stack,
                    "own_small_pages": small_pages,
                }
                for number in range(rounds + 1):  # the first round warms both sides up
                    for side in in_turn(number, sides):
                        rates[side].append(moved(sides[side], blocks))
            steps_of = measure_steps(address, rounds, steps)
    counted = {side: taken[1:] for side, taken in rates.items()}
    wall = {side: [_rates_of(each) for each in taken] for side, taken in counted.items()}
    return {**summary(wall, [("host", "own"), ("host", "own_small_pages")]), **steps_of}


def stack_of(entry: dict[str, object], side: str, **primary: object) -> dict[str, object]:
    if "path" in entry:
        entry = {**entry, "path": f"{entry['path']}-{side}"}
    return {
        "namespace": {"model": side},
        "block": {"bytes": BLOCK_BYTES},
        "primary": {"capacity": PRIMARY_BLOCKS * BLOCK_BYTES, **primary},
        "secondary": [entry],
    }


def moved(stack: Stack | HostStack, blocks: int) -> Sample:
    """Store new blocks, and load them."""
    first = next(_numbers) * blocks
    keys = [block_key(first + at) for at in range(blocks)]
    content = np.random.default_rng(first).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
    found = np.zeros_like(content)
    parts = [slice(at, at + BATCH) for at in range(0, blocks, BATCH)]

    def put() -> None:
        for part in parts:
            assert stack.put(keys[part], content[part], timeout=60) == BATCH
            assert stack.flush(60)  # a server does not let `put` wait for the tier's budget, a quarter of the rows

    def get() -> None:
        for part in parts:
            assert stack.get(keys[part], found[part], timeout=60) == BATCH

    taken = sample(content.nbytes / 1e9, timed(put), timed(get))
    assert np.array_equal(content, found), "wrong bytes"
    return taken


def _rates_of(taken: Sample) -> Sample:
    return {name: value for name, value in taken.items() if "cpu" not in name}  # the server's is elsewhere


def feed(address: str) -> None:
    """Put and get without a pause, until the parent ends this process."""
    content = np.random.default_rng(0).integers(0, 256, (BATCH, BLOCK_BYTES), dtype=np.uint8)
    with connect(address, name="feeder") as stack:

        def get() -> None:
            first = 1 << 40
            for number in itertools.count():
                at = first + number % (BLOCKS // BATCH) * BATCH
                stack.get([block_key(at + each) for each in range(BATCH)], timeout=10)

        for at in range(1 << 40, (1 << 40) + BLOCKS, BATCH):
            stack.put([block_key(at + each) for each in range(BATCH)], content, timeout=60)
        threading.Thread(target=get, daemon=True).start()
        print("feeding", flush=True)
        for number in itertools.count((1 << 41), BATCH):
            stack.put([block_key(number + each) for each in range(BATCH)], content, timeout=60)


@contextmanager
def feeding(address: str) -> Iterator[None]:
    command = [sys.executable, __file__, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the other process has failed"
        try:
            yield
        finally:
            process.kill()


def measure_steps(address: str, rounds: int, steps: int) -> dict[str, object]:
    gc.collect()
    gc.freeze()
    engine = Engine(address)
    phases: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    try:
        for _ in range(rounds):
            phases["idle"].append(percentiles(engine.steps(steps)))
            with feeding(address):
                phases["busy"].append(percentiles(engine.steps(steps)))
            time.sleep(1)  # the server frees what the other process had
    finally:
        engine.close()
    idle, busy = ([each["p99"] for each in phases[name]] for name in ("idle", "busy"))
    medians = {name: spread([each["p50"] for each in taken]) for name, taken in phases.items()}
    return {
        **{f"{name}_step_p50_us": taken for name, taken in medians.items()},
        "idle_step_p99_us": spread(idle),
        "busy_step_p99_us": spread(busy),
        "busy_over_idle_p99": spread(ratios(busy, idle)),
    }


class Engine:
    """The scheduler of an attached engine."""

    def __init__(self, address: str) -> None:
        self._manager: AttachedManager = attached(address)
        self._numbers = itertools.count()
        resident = [block_key((1 << 42) + at) for at in range(KEYS // 2)]
        absent = [block_key((1 << 43) + at) for at in range(KEYS // 2)]
        store(self._manager, resident)
        self._manager.prefetch(resident, ReqContext("resident"))  # leased until the end: no traffic evicts them
        self._wanted = resident + absent
        self._last = self._begin()
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def steps(self, count: int) -> list[float]:
        """Return the microseconds of steps."""
        return [self._step() for _ in range(count)]

    def close(self) -> None:
        os.close(self._schedstat)
        self._manager.shutdown()

    def _begin(self) -> ReqContext:
        context = ReqContext(f"step-{next(self._numbers)}")
        self._manager.on_new_request(context)
        self._manager.prefetch(self._wanted, context)
        return context

    def _step(self) -> float:
        time.sleep(MODEL_STEP_S)
        manager, last = self._manager, self._last
        new = [block_key((1 << 44) + next(self._numbers)) for _ in range(STORED)]
        start_s = time.perf_counter() - self._processor_wait_s()
        self._last = self._begin()
        manager.expect(KEYS, last)
        lookup = manager.lookup
        for key in self._wanted:
            lookup(key, last)
        output = manager.prepare_store(new, last)
        if output is not None:
            manager.complete_store(output.keys_to_store, last)
        manager.on_request_finished(last)
        manager.on_schedule_end()
        return (time.perf_counter() - self._processor_wait_s() - start_s) * 1e6

    def _processor_wait_s(self) -> float:
        """Return for how long this thread has been ready to run and had no processor."""
        return int(os.pread(self._schedstat, 128, 0).split()[1]) / 1e9


if __name__ == "__main__":
    main()
