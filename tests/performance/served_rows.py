"""What a host's server takes for many blocks: memory a block, and how long it answers while it fills.

    python tests/performance/served_rows.py --rows 10000,100000,1000000
    python tests/performance/served_rows.py --base /path/to/python=/path/to/checkout --rounds 5

One program fills the rows of `tiered-kv serve`, twice, so that the second half evicts. Another one asks for an absent
block meanwhile, every 5 ms: `ping`. The memory is the server's own, without the rows. With `--base`, the script
measures another build too, in turn with this one, and prints both sides' medians, their ratio, and this side's spread.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import tiered_kv
from tiered_kv.base import OffloadKey

JOB_BLOCKS, BLOCK_BYTES = 512, 512
PAUSE_S, TIMEOUT_S = 0.005, 60.0
UNITS = {
    "memory_b": "server's memory a block, B",
    "fill_us": "fill, a block, us",
    "ping_p50_ms": "ping while it fills, p50, ms",
    "ping_p99_ms": "ping while it fills, p99, ms",
    "ping_max_ms": "ping while it fills, longest, ms",
}


def keys_of(first: int, count: int) -> list[OffloadKey]:
    names = (hashlib.sha256(number.to_bytes(8, "big")).digest() for number in range(first, first + count))
    return [OffloadKey(name + bytes(4)) for name in names]


def own_memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel reports no memory")


def ping(address: str) -> None:
    """Ask for an absent block again and again, until standard input ends; print the seconds of each answer."""
    block, taken_s = np.empty((1, BLOCK_BYTES), np.uint8), list[float]()
    with tiered_kv.connect(address) as cache:
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            began_s = time.perf_counter()
            assert not cache.get(keys_of(1 << 40, 1), block, timeout=TIMEOUT_S)
            taken_s.append(time.perf_counter() - began_s)
    print(json.dumps(taken_s))


def measure(rows: int) -> dict[str, float]:
    """Return what one server of `rows` rows takes, by the names in `UNITS`."""
    stack = {
        "namespace": {"model": "measured"},
        "block": {"bytes": BLOCK_BYTES},
        "primary": {"capacity": rows * BLOCK_BYTES},
    }
    with tempfile.TemporaryDirectory() as directory:
        file, address = Path(directory, "stack.yaml"), f"unix:{directory}/cache.sock"
        file.write_text(json.dumps(stack))
        serve = [sys.executable, "-m", "tiered_kv", "serve", str(file), "--socket", f"{directory}/cache.sock"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert "serving" in server.stdout.readline()
                return _filled(address, server.pid, rows)
            finally:
                server.terminate()


def _filled(address: str, pid: int, rows: int) -> dict[str, float]:
    content = np.zeros((JOB_BLOCKS, BLOCK_BYTES), np.uint8)
    asking = [sys.executable, __file__, "--ping", address]
    with tiered_kv.connect(address) as cache:
        cache.put(keys_of(1 << 41, JOB_BLOCKS), content, timeout=TIMEOUT_S)  # what a first store makes
        with subprocess.Popen(asking, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pinging:
            assert pinging.stdout is not None
            assert "ready" in pinging.stdout.readline()
            jobs = rows // JOB_BLOCKS
            before, began_s = own_memory_bytes(pid), time.perf_counter()
            for number in range(2 * jobs):
                stored = cache.put(keys_of(number * JOB_BLOCKS, JOB_BLOCKS), content, timeout=TIMEOUT_S)
                assert stored == JOB_BLOCKS
            filled_s = time.perf_counter() - began_s
            pings = json.loads(pinging.communicate()[0])
        memory_bytes = own_memory_bytes(pid) - before
    p50, p99 = np.percentile(np.array(pings), [50, 99]).tolist()
    return {
        "memory_b": memory_bytes / (jobs * JOB_BLOCKS),
        "fill_us": filled_s / (2 * jobs * JOB_BLOCKS) * 1e6,
        "ping_p50_ms": p50 * 1e3,
        "ping_p99_ms": p99 * 1e3,
        "ping_max_ms": max(pings) * 1e3,
    }


def run(python: str, checkout: str, rows: int) -> dict[str, float]:
    command = [python, str(Path(__file__).resolve()), "--one", str(rows)]
    environment = {**os.environ, "PYTHONPATH": checkout}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    from tests.performance.bench import command_line, print_sides  # an older build has not all of it

    parser = command_line(__doc__)
    parser.add_argument("--rows", default="10000,100000,1000000", help="numbers of rows, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", metavar="PYTHON=CHECKOUT", help="the build to compare with")
    arguments = parser.parse_args()
    sides = [(sys.executable, str(Path(__file__).resolve().parents[2]))]
    if arguments.base:
        python, _, checkout = arguments.base.partition("=")
        sides.insert(0, (python, checkout))
    for rows in map(int, arguments.rows.split(",")):
        samples: list[list[dict[str, float]]] = [[] for _ in sides]
        for _ in range(arguments.rounds):
            for side, of_side in zip(sides, samples, strict=True):
                of_side.append(run(*side, rows))
        print(f"{rows:,} rows, {arguments.rounds} rounds")
        print_sides(UNITS, samples)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ping"]:
        ping(sys.argv[2])
    elif sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(int(sys.argv[2]))))
    else:
        main()
