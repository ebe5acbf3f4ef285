"""What millions of blocks cost the nvme tier: memory, collections, lookups, loads, evicting, a reset, openings.

    python tests/performance/nvme_millions.py DIRECTORY --blocks 10000000
    python tests/performance/nvme_millions.py DIRECTORY --blocks 10000000 --rounds 5 --before /opt/before/bin/python

Prints a table. With `--before`, the interpreter of another build takes turns with this one, over the same directory. A
tier of `blocks` blocks of 512 bytes takes some 700 bytes of disk for each. It is driven as the tiering manager drives
it: jobs are submitted, and polled. Each step is a new process:

fill   Stores the blocks, unless most of them are there. Nothing is measured.
open   Opens the directory. Memory, a full collection, lookups and loads are measured. The tier shuts down.
kill   Opens the directory, stores some blocks, and ends by SIGKILL.
evict  Opens the directory and fills it up. Stores and loads are measured while it evicts. Then it is reset; the file of
       its epoch is put back, so that the next step finds the blocks again.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.base import JobMetadata, SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

BLOCK_BYTES = 512
JOB_BLOCKS = 64
FILL_JOB_BLOCKS = 1024
IN_FLIGHT_MAX = 8  # jobs of the filling
ROWS = IN_FLIGHT_MAX * FILL_JOB_BLOCKS
KILLED_JOBS = 64  # jobs that are stored before the SIGKILL
STORED_BYTES = BLOCK_BYTES + 32 + 36 + 32 + 36  # a payload, its entry and key in a batch's header and in a summary

LOOKUPS = 20_000
ROUNDS = 9
LOADS = 1_000
STORED_FIRST = 64 * FILL_JOB_BLOCKS  # blocks that are stored at once until the tier evicts
EVICTING_S = 10.0

_CONTEXT = ReqContext("millions")
_SPEC = TierSpec("nvme", BLOCK_BYTES, namespace_digest=b"millions".ljust(16))


def block_keys(first: int, count: int) -> list[OffloadKey]:
    """Return keys of 36 bytes, as an engine's: random bytes, and a group."""
    words: NDArray[np.uint64] = np.arange(4 * first, 4 * (first + count), dtype=np.uint64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # splitmix64
        words = ((words + np.uint64(0x9E3779B97F4A7C15)) ^ (words >> np.uint64(30))) * np.uint64(factor)
        words ^= words >> np.uint64(31)
    data = words.tobytes()
    return [OffloadKey(data[at : at + 32] + b"\0\0\0\0") for at in range(0, 32 * count, 32)]


class Driver:
    """One tier, and the jobs in flight."""

    def __init__(self, path: str, blocks: int) -> None:
        self._view = memoryview(bytearray(os.urandom(BLOCK_BYTES) * ROWS)).cast("B", (ROWS, BLOCK_BYTES))
        self._job_ids = itertools.count()
        self._pending: dict[int, tuple[str, float]] = {}
        capacity_bytes = int(blocks * STORED_BYTES * 1.15) + (96 << 20)
        entry: dict[str, object] = {"type": "nvme", "path": path, "capacity": capacity_bytes}
        began_s, cpu_s = time.perf_counter(), time.process_time()
        self.tier: SecondaryTierManager = SecondaryTierFactory.create(_SPEC, self._view, entry)
        self.opened_s, self.opened_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s

    def submit(self, keys: Sequence[OffloadKey], kind: str) -> None:
        job_id = next(self._job_ids)
        first = job_id % IN_FLIGHT_MAX * FILL_JOB_BLOCKS
        rows = np.arange(first, first + len(keys), dtype=np.int64)
        job = JobMetadata(job_id, keys, rows, kind == "get", _CONTEXT)
        self._pending[job_id] = kind, time.perf_counter()
        (self.tier.submit_load if kind == "get" else self.tier.submit_store)(job)

    def poll(self, taken_s: dict[str, list[float]] | None = None) -> None:
        """Take the jobs that have ended, and note how long each took."""
        for result in self.tier.get_finished():
            kind, began_s = self._pending.pop(result.job_id)
            if taken_s is not None:
                taken_s[kind].append(time.perf_counter() - began_s)

    def in_flight(self, kind: str) -> int:
        return sum(each == kind for each, _ in self._pending.values())

    def drain(self) -> None:
        while self._pending:
            self.poll()
            time.sleep(0.0002)

    def fill(self, first: int, count: int) -> None:
        for begin in range(first, first + count, FILL_JOB_BLOCKS):
            while len(self._pending) >= IN_FLIGHT_MAX:
                self.poll()
                time.sleep(0.0002)
            self.submit(block_keys(begin, min(FILL_JOB_BLOCKS, first + count - begin)), "put")
        self.drain()

    def stat(self, name: str) -> int:
        return int(self.tier.stats()[name])


def fill(path: str, blocks: int) -> dict[str, float]:
    driver = Driver(path, blocks)
    sample = [block_keys(number, 1)[0] for number in range(0, blocks, max(1, blocks // 1000))]
    if sum(bool(driver.tier.lookup(key, _CONTEXT)) for key in sample) < 0.7 * len(sample):
        driver.fill(0, blocks)
        time.sleep(1.0)  # the last full segments get their summaries
    driver.tier.shutdown()
    return {}


def open_(path: str, blocks: int) -> dict[str, float]:
    small = Driver(f"{path}-small", JOB_BLOCKS)  # what every process makes once
    small.fill(0, JOB_BLOCKS)
    small.tier.shutdown()
    before_bytes, before_s = resident_bytes(), collection_s()
    driver = Driver(path, blocks)
    found = driver.stat("blocks")
    result = {
        "clean_opening_s": driver.opened_s,
        "clean_opening_cpu_s": driver.opened_cpu_s,
        "bytes_a_block": (resident_bytes() - before_bytes - BLOCK_BYTES * ROWS) / found,
        "collection_ns_a_block": (collection_s() - before_s) / found * 1e9,
        **lookups(driver.tier, blocks),
        **loads(driver, blocks),
    }
    driver.tier.shutdown()
    return result


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel reports no memory")


def collection_s() -> float:
    gc.collect()
    times: list[float] = []
    for _ in range(5):
        began_s = time.thread_time()
        gc.collect()
        times.append(time.thread_time() - began_s)
    return min(times)


def lookups(tier: SecondaryTierManager, blocks: int) -> dict[str, float]:
    """Return the time of a lookup: of random blocks ("cold"), and of the same few again and again ("hot")."""
    rng = random.Random(0)
    spread = [block_keys(rng.randrange(blocks), 1)[0] for _ in range(2 * LOOKUPS)]
    spread = [key for key in spread if tier.lookup(key, _CONTEXT)][:LOOKUPS]
    result: dict[str, float] = {}
    for name, keys in {
        "cold_hit": spread,
        "hot_hit": spread[:512] * (LOOKUPS // 512),
        "cold_miss": block_keys(1 << 40, LOOKUPS),
        "hot_miss": block_keys(1 << 41, 512) * (LOOKUPS // 512),
    }.items():
        times = []
        for _ in range(ROUNDS):
            lookup = tier.lookup
            began_s = time.perf_counter()
            for key in keys:
                lookup(key, _CONTEXT)
            times.append((time.perf_counter() - began_s) / len(keys))
        result[f"lookup_{name}_ns"] = min(times) * 1e9
    return result


def loads(driver: Driver, blocks: int) -> dict[str, float]:
    """Return the time of loads of 64 blocks that were stored together, one after another."""
    rng, taken_s = random.Random(1), defaultdict[str, list[float]](list)
    for _ in range(LOADS):
        keys: list[OffloadKey] = []
        while not keys or not all(driver.tier.lookup(key, _CONTEXT) for key in keys):
            keys = block_keys(rng.randrange(blocks // JOB_BLOCKS) * JOB_BLOCKS, JOB_BLOCKS)
        driver.submit(keys, "get")
        while driver.in_flight("get"):
            driver.poll(taken_s)
            time.sleep(0.0001)
    return percentiles("get", taken_s["get"])


def percentiles(name: str, taken_s: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(taken_s), [50, 99])
    return {f"{name}_p50_ms": p50 * 1e3, f"{name}_p99_ms": p99 * 1e3, f"{name}_max_ms": max(taken_s) * 1e3}


def kill(path: str, blocks: int) -> dict[str, float]:
    driver = Driver(path, blocks)
    driver.fill(time.time_ns(), KILLED_JOBS * JOB_BLOCKS)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def evict(path: str, blocks: int) -> dict[str, float]:
    """Store and load while the tier evicts, with up to four stores and one load in flight."""
    epoch = Path(path, "epoch").read_bytes()
    driver = Driver(path, blocks)
    result = {"killed_opening_s": driver.opened_s, "killed_opening_cpu_s": driver.opened_cpu_s}
    start = newest = time.time_ns()  # keys that no run has had
    while newest < start + STORED_FIRST or not driver.stat("evicted_blocks_total"):
        driver.fill(newest, STORED_FIRST)
        newest += STORED_FIRST
    rng, taken_s = random.Random(2), defaultdict[str, list[float]](list)
    evicted, end_s = driver.stat("evicted_blocks_total"), time.monotonic() + EVICTING_S
    while time.monotonic() < end_s:
        while driver.in_flight("put") < 4:
            driver.submit(block_keys(newest, JOB_BLOCKS), "put")
            newest += JOB_BLOCKS
        if not driver.in_flight("get"):
            jobs = min(newest - start, blocks // 4) // JOB_BLOCKS - 4  # of those that are stored and not evicted
            driver.submit(block_keys(newest - (4 + rng.randrange(1, jobs)) * JOB_BLOCKS, JOB_BLOCKS), "get")
        driver.poll(taken_s)
        time.sleep(0.0001)
    driver.drain()
    result["evicted_blocks_per_s"] = (driver.stat("evicted_blocks_total") - evicted) / EVICTING_S
    for kind in ("put", "get"):
        result |= percentiles(f"evicting_{kind}", taken_s[kind])
    began_s = time.perf_counter()
    driver.tier.reset_cache()
    result["reset_ms"] = (time.perf_counter() - began_s) * 1e3
    longest_s = last_s = 0.0
    end_s = time.perf_counter() + 3.0
    while (now_s := time.perf_counter()) < end_s:  # what the reset hid is given back meanwhile
        longest_s, last_s = max(longest_s, now_s - (last_s or now_s)), now_s
    result["after_reset_pause_ms"] = longest_s * 1e3
    driver.tier.shutdown()
    Path(path, "epoch").write_bytes(epoch)
    return result


STEPS: dict[str, Callable[[str, int], Any]] = {"fill": fill, "open": open_, "kill": kill, "evict": evict}


def run(python: str, path: Path, blocks: int) -> dict[str, float]:
    """Return what one build measures."""
    result: dict[str, float] = {}
    for step in STEPS:
        command = [python, __file__, str(path), "--blocks", str(blocks), "--step", step]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
        assert done.returncode == (-signal.SIGKILL if step == "kill" else 0), f"step {step} failed"
        result |= json.loads(done.stdout or "{}")
    return result


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--blocks", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", help="the interpreter of another build")
    parser.add_argument("--step", choices=STEPS, help="one step, in this process")
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(STEPS[arguments.step](str(arguments.directory), arguments.blocks)))
        return
    builds = [build for build in (arguments.before, sys.executable) if build]
    samples: dict[str, list[dict[str, float]]] = {build: [] for build in builds}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as path:
        for number in range(arguments.rounds):
            for build in builds[:: -1 if number % 2 else 1]:
                samples[build].append(run(build, Path(path, "nvme"), arguments.blocks))
    print(f"{arguments.blocks:,} blocks\n\n| what | {'before | now | ratio' if arguments.before else 'now'} |")
    print(f"| {'--- | ' * (len(builds) + len(builds) // 2 * 1)}--- |")
    for name in samples[sys.executable][0]:
        columns = [[each[name] for each in samples[build]] for build in builds]
        if arguments.before:
            columns.append([now / before for before, now in zip(*columns, strict=True)])
        print(f"| {name} | {' | '.join(map(shown, columns))} |")


def shown(values: Sequence[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
