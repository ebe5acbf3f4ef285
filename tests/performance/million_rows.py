"""What grows with the number of rows of the primary tier: memory, pauses, resets and calls.

    python tests/performance/million_rows.py --policy lru --rows 10000,100000,1000000
    python tests/performance/million_rows.py --base /path/to/python=/path/to/checkout --rounds 5
    python tests/performance/million_rows.py --tenants 10 --rows 100000

Times are of the processor, so that others' use of it does not count. Each measurement runs in a process of its own.
With `--base`, the script measures another build too, in turn with this one, and prints both sides and their ratio:
medians, and the spread of this side. With `--tenants`, so many tenants with equal shares store in turn, and the other
side is this build without shares.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUEST_KEYS = 512
BLOCK_BYTES = 512
STORES = 400
"""Stores of `REQUEST_KEYS` blocks, with an eviction each, whose times are measured."""
UNITS = {
    "memory_b": "memory a row, B",
    "store_p50_ms": "store with eviction, p50, ms",
    "store_p99_ms": "store with eviction, p99, ms",
    "store_max_ms": "store with eviction, longest, ms",
    "collection_ms": "full collection, ms",
    "hit_ns": "lookup, hit, ns",
    "hot_hit_ns": "lookup, hit, the same 512 keys, ns",
    "miss_ns": "lookup, miss, ns",
    "load_us": "prepare_load and complete_load of 512, us",
    "step_us": "idle step, us",
    "end_us": "end of a request, us",
    "reset_ms": "reset, ms",
    "reset_step_ms": "longest step after it, ms",
}


_now_s = time.thread_time


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(rows: int, policy: str, tenants: int = 0) -> dict[str, float]:
    """Return what one tier of `rows` rows takes: memory and times by the names in `UNITS`."""
    from tiered_kv.base import OffloadKey, ReqContext
    from tiered_kv.cpu.backend import CPUBackend
    from tiered_kv.cpu.region import PrimaryRegion
    from tiered_kv.tiering.manager import TieringOffloadingManager

    try:
        primary_class: Any = importlib.import_module("tiered_kv.cpu.rows").PrimaryRows
    except ImportError:  # an older build has another one
        primary_class = importlib.import_module("tiered_kv.cpu.manager").CPUOffloadingManager

    class NoMemory(PrimaryRegion):
        def __init__(self) -> None:
            self.num_blocks, self.block_bytes = rows, BLOCK_BYTES

        def close(self) -> bool:
            return True

        def unlink(self) -> None:
            pass

    found: dict[str, float] = {}
    primary: Any = primary_class
    if tenants:
        from tiered_kv.cpu.shared_rows import SharedRows

        limits = {"default": f"{100 / tenants:.6f}%"}

        def primary(backend: CPUBackend, policy: str) -> SharedRows:
            return SharedRows(backend, policy, limits)

    manager = TieringOffloadingManager(primary(CPUBackend(NoMemory()), policy))
    numbers = itertools.count()

    def begin() -> ReqContext:
        number = next(numbers)
        params = {"tiered_kv": {"tenant": f"tenant-{number % tenants}"}} if tenants else None
        return ReqContext(str(number), params)

    first_of = 0

    def keys_of(first: int, count: int = REQUEST_KEYS) -> list[OffloadKey]:
        return [OffloadKey(key(number)) for number in range(first, first + count)]

    def store(first: int, count: int = REQUEST_KEYS) -> float:
        keys = keys_of(first, count)
        context = begin()
        manager.on_new_request(context)
        begin_s = _now_s()
        output = manager.prepare_store(keys, context)
        assert output is not None
        assert len(output.keys_to_store) == count
        manager.complete_store(keys, context)
        taken_s = _now_s() - begin_s
        manager.on_request_finished(context)
        manager.on_schedule_end()
        return taken_s

    def median_of(act: Callable[[], None], times: int) -> float:
        taken = []
        for _ in range(times):
            begin_s = _now_s()
            act()
            taken.append(_now_s() - begin_s)
        return statistics.median(taken)

    gc.collect()
    before = memory_bytes()
    for first in range(0, rows - REQUEST_KEYS + 1, REQUEST_KEYS):
        store(first)
    first_of = rows // REQUEST_KEYS * REQUEST_KEYS
    for _ in range(min(2 * rows // REQUEST_KEYS, 6000)):  # as in a process that has run for some time
        store(first_of)
        first_of += REQUEST_KEYS
    gc.collect()
    found["memory_b"] = (memory_bytes() - before) / rows
    collections: list[float] = []
    for _ in range(5):
        begin_s = _now_s()
        gc.collect()
        collections.append(_now_s() - begin_s)
    found["collection_ms"] = statistics.median(collections) * 1e3

    stores = []
    for _ in range(STORES):
        stores.append(store(first_of))
        first_of += REQUEST_KEYS
    stores.sort()
    found["store_p50_ms"] = stores[STORES // 2] * 1e3
    found["store_p99_ms"] = stores[int(STORES * 0.99)] * 1e3
    found["store_max_ms"] = stores[-1] * 1e3

    context = ReqContext("lookups")
    manager.on_new_request(context)
    lookup = manager.lookup
    gc.collect()
    gc.disable()

    def rate_ns(keys: list[OffloadKey], expected: bool) -> float:
        begin_s = _now_s()
        for each in keys:
            if lookup(each, context) is not expected:
                raise AssertionError(f"a lookup was not {expected}")
        return (_now_s() - begin_s) / len(keys) * 1e9

    resident = first_of - rows // REQUEST_KEYS * REQUEST_KEYS
    span = max(1, (rows // REQUEST_KEYS - 2) * 7 // 8)
    starts = [resident + (2 + index * 37 % span) * REQUEST_KEYS for index in range(40)]
    prompts = [keys_of(start) for start in starts]
    absent = [keys_of(10**9 + index * REQUEST_KEYS) for index in range(40)]
    found["hit_ns"] = statistics.median(rate_ns(keys, True) for keys in prompts)
    found["hot_hit_ns"] = min(rate_ns(prompts[0], True) for _ in range(40))
    found["miss_ns"] = statistics.median(rate_ns(keys, False) for keys in absent)

    def load() -> None:
        manager.prepare_load(prompts[0], context)
        manager.complete_load(prompts[0], context)

    found["load_us"] = median_of(load, 40) * 1e6
    found["step_us"] = median_of(manager.on_schedule_end, 2000) * 1e6
    ends = []
    for _ in range(40):
        ended = begin()
        manager.on_new_request(ended)
        keys = keys_of(first_of)
        first_of += REQUEST_KEYS
        manager.prepare_store(keys, ended)
        manager.complete_store(keys, ended)
        begin_s = _now_s()
        manager.on_request_finished(ended)
        ends.append(_now_s() - begin_s)
        manager.on_schedule_end()
    found["end_us"] = statistics.median(ends) * 1e6
    gc.enable()

    begin_s = _now_s()
    manager.reset_cache()
    found["reset_ms"] = (_now_s() - begin_s) * 1e3
    steps = []
    for _ in range(rows // 512 + 2):
        begin_s = _now_s()
        manager.on_schedule_end()
        steps.append(_now_s() - begin_s)
    found["reset_step_ms"] = max(steps) * 1e3
    return found


def run(python: str, checkout: str, rows: int, policy: str, tenants: int = 0) -> dict[str, float]:
    command = [python, str(Path(__file__).resolve()), "--one", str(rows), "--policy", policy, "--tenants", str(tenants)]
    environment = {**os.environ, "PYTHONPATH": checkout}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--rows", default="10000,100000,1000000", help="numbers of rows, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", metavar="PYTHON=CHECKOUT", help="the build to compare with")
    parser.add_argument("--tenants", type=int, default=0, help="how many tenants share the rows")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.policy, arguments.tenants)))
        return
    own = sys.executable, str(Path(__file__).resolve().parents[2])
    sides = [(*own, arguments.tenants)]
    if arguments.base:
        python, _, checkout = arguments.base.partition("=")
        sides.insert(0, (python, checkout, 0))
    elif arguments.tenants:
        sides.insert(0, (*own, 0))
    for rows in map(int, arguments.rows.split(",")):
        samples: list[list[dict[str, float]]] = [[] for _ in sides]
        for _ in range(arguments.rounds):
            for side, side_samples in zip(sides, samples, strict=True):
                side_samples.append(run(*side[:2], rows, arguments.policy, side[2]))
        print(f"{rows:,} rows, {arguments.policy}, {arguments.rounds} rounds")
        for name, label in UNITS.items():
            of_sides = [[sample[name] for sample in side_samples] for side_samples in samples]
            medians = [statistics.median(values) for values in of_sides]
            ratio = f"   {medians[1] / medians[0]:.3f} x" if len(medians) > 1 else ""
            spread = f"{min(of_sides[-1]):.4g} to {max(of_sides[-1]):.4g}"
            print(f"  {label:45} {'   '.join(f'{value:10.4g}' for value in medians)}{ratio}   ({spread})", flush=True)


if __name__ == "__main__":
    main()
