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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.base import OffloadKey, ReqContext
    from tiered_kv.cpu.backend import CPUBackend

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


class Tier:
    """One tier of `rows` rows, without memory, and what is measured of it. An older build runs it, too."""

    def __init__(self, rows: int, policy: str, tenants: int) -> None:
        from tiered_kv.cpu.backend import CPUBackend
        from tiered_kv.cpu.region import PrimaryRegion
        from tiered_kv.tiering.manager import TieringOffloadingManager

        class NoMemory(PrimaryRegion):
            def __init__(self) -> None:
                self.num_blocks, self.block_bytes = rows, BLOCK_BYTES

            def close(self) -> bool:
                return True

            def unlink(self) -> None:
                pass

        self._rows, self._tenants = rows, tenants
        self._numbers = itertools.count()
        self._next_key = 0
        self.found: dict[str, float] = {}
        self.manager = TieringOffloadingManager(_primary(CPUBackend(NoMemory()), policy, tenants))

    def fill(self) -> None:
        gc.collect()
        before = memory_bytes()
        for _ in range(self._rows // REQUEST_KEYS):
            self.store()
        for _ in range(min(2 * self._rows // REQUEST_KEYS, 6000)):  # as in a process that has run for some time
            self.store()
        gc.collect()
        self.found["memory_b"] = (memory_bytes() - before) / self._rows
        self.found["collection_ms"] = _median_s(gc.collect, 5) * 1e3

    def store(self) -> float:
        """Store the blocks of a new request; return the seconds of both calls."""
        keys, context = self._new_keys(), self._begin()
        begin_s = _now_s()
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        assert len(output.keys_to_store) == len(keys)
        self.manager.complete_store(keys, context)
        taken_s = _now_s() - begin_s
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end()
        return taken_s

    def measure_stores(self) -> None:
        taken = sorted(self.store() for _ in range(STORES))
        self.found["store_p50_ms"] = taken[STORES // 2] * 1e3
        self.found["store_p99_ms"] = taken[int(STORES * 0.99)] * 1e3
        self.found["store_max_ms"] = taken[-1] * 1e3

    def measure_calls(self) -> None:
        """Measure lookups, loads, idle steps and ends of requests, without the garbage collector."""
        context = self._begin()
        span = max(1, (self._rows // REQUEST_KEYS - 2) * 7 // 8)
        resident = self._next_key - self._rows // REQUEST_KEYS * REQUEST_KEYS
        prompts = [_keys_of(resident + (2 + index * 37 % span) * REQUEST_KEYS) for index in range(40)]
        absent = [_keys_of(10**9 + index * REQUEST_KEYS) for index in range(40)]

        def load() -> None:
            self.manager.prepare_load(prompts[0], context)
            self.manager.complete_load(prompts[0], context)

        gc.collect()
        gc.disable()
        self.found["hit_ns"] = statistics.median(self._lookup_ns(keys, context, True) for keys in prompts)
        self.found["hot_hit_ns"] = min(self._lookup_ns(prompts[0], context, True) for _ in range(40))
        self.found["miss_ns"] = statistics.median(self._lookup_ns(keys, context, False) for keys in absent)
        self.found["load_us"] = _median_s(load, 40) * 1e6
        self.found["step_us"] = _median_s(self.manager.on_schedule_end, 2000) * 1e6
        self.found["end_us"] = statistics.median(self._end_s() for _ in range(40)) * 1e6
        gc.enable()

    def measure_reset(self) -> None:
        self.found["reset_ms"] = _median_s(self.manager.reset_cache, 1) * 1e3
        steps = self._rows // 512 + 2
        self.found["reset_step_ms"] = max(_median_s(self.manager.on_schedule_end, 1) for _ in range(steps)) * 1e3

    def _new_keys(self) -> list[OffloadKey]:
        first = self._next_key
        self._next_key += REQUEST_KEYS
        return _keys_of(first)

    def _begin(self) -> ReqContext:
        from tiered_kv.base import ReqContext

        number = next(self._numbers)
        params = {"tiered_kv": {"tenant": f"tenant-{number % self._tenants}"}} if self._tenants else None
        context = ReqContext(str(number), params)
        self.manager.on_new_request(context)
        return context

    def _lookup_ns(self, keys: list[OffloadKey], context: ReqContext, expected: bool) -> float:
        lookup = self.manager.lookup
        begin_s = _now_s()
        for each in keys:
            if lookup(each, context) is not expected:
                raise AssertionError(f"a lookup was not {expected}")
        return (_now_s() - begin_s) / len(keys) * 1e9

    def _end_s(self) -> float:
        """Return how long the end of a request takes that has stored its blocks."""
        keys, context = self._new_keys(), self._begin()
        self.manager.prepare_store(keys, context)
        self.manager.complete_store(keys, context)
        begin_s = _now_s()
        self.manager.on_request_finished(context)
        taken_s = _now_s() - begin_s
        self.manager.on_schedule_end()
        return taken_s


def _primary(backend: CPUBackend, policy: str, tenants: int) -> Any:  # Any: each build has its own class
    if tenants:
        from tiered_kv.cpu.shared_rows import SharedRows

        return SharedRows(backend, policy, {"default": f"{100 / tenants:.6f}%"})
    try:
        return importlib.import_module("tiered_kv.cpu.rows").PrimaryRows(backend, policy)
    except ImportError:  # an older build has another one
        return importlib.import_module("tiered_kv.cpu.manager").CPUOffloadingManager(backend, policy)


def _keys_of(first: int) -> list[OffloadKey]:
    from tiered_kv.base import OffloadKey

    return [OffloadKey(key(number)) for number in range(first, first + REQUEST_KEYS)]


def _median_s(act: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begin_s = _now_s()
        act()
        taken.append(_now_s() - begin_s)
    return statistics.median(taken)


def measure(rows: int, policy: str, tenants: int = 0) -> dict[str, float]:
    """Return what one tier of `rows` rows takes: memory and times by the names in `UNITS`."""
    tier = Tier(rows, policy, tenants)
    tier.fill()
    tier.measure_stores()
    tier.measure_calls()
    tier.measure_reset()
    return tier.found


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
    from tests.performance.bench import print_sides  # an older build has none

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
        print_sides(UNITS, samples)


if __name__ == "__main__":
    main()
