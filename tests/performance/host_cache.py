"""What a host's cache costs an engine, in microseconds: `python tests/performance/host_cache.py [--requests N]`.

It starts `tiered-kv serve`, attaches as an engine, and prints percentiles for a request of 512 keys: 8,192 tokens in
blocks of 16. All blocks are stored. A pause between requests stands for an engine's step. The figures are of

- acquire: from the request's arrival until its rows are there;
- acquire_alone: without what the engine and the server stood ready in the run queue (Linux, schedstat);
- scheduler: what the engine's thread does for that, when the answer is read a step later: it sends the keys, and reads;
- lookups: what the thread does then to look all keys up.

`--lmcache PYTHON`, of an environment with LMCache, also runs LMCache's own server with as many tokens, in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import socket
import struct
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.support.host_server import server_process
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.server.attach import Attachment
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.protocol import Hello

ROWS, ROW_BYTES, KEYS = 65_536, 4096, 512
STEP_S = 0.003
ROUNDS = 3
_PEER = Path(__file__).with_name("lmcache_lookups.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--lmcache", type=Path, metavar="PYTHON")
    arguments = parser.parse_args()
    count, taken = arguments.requests, defaultdict[str, list[float]](list)
    stack = {"namespace": {"model": "m"}, "block": {"bytes": ROW_BYTES}, "primary": {"capacity": ROWS * ROW_BYTES}}
    for _ in range(1 if arguments.lmcache is None else ROUNDS):
        with tempfile.TemporaryDirectory() as directory, server_process(Path(directory), stack):
            for name, seconds in measure(f"unix:{directory}/cache.sock", count).items():
                taken[name] += seconds
        if arguments.lmcache is not None:
            command = [str(arguments.lmcache), str(_PEER), "--requests", str(count // 2)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
            taken["lmcache_us"] += json.loads(output)["lookup_s"]
    figures = {name: percentiles(seconds) for name, seconds in taken.items()}
    if "lmcache_us" in figures:
        figures["lmcache_over_acquire"] = {
            name: round(theirs / figures["acquire_us"][name], 2) for name, theirs in figures["lmcache_us"].items()
        }
    print(json.dumps(figures, indent=2))


def measure(address: str, count: int) -> dict[str, list[float]]:
    manager = attached(address)
    hashes = np.random.default_rng(1).bytes(32 * ROWS // 2)
    stored = [make_offload_key(hashes[at : at + 32], 0) for at in range(0, len(hashes), 32)]
    for at in range(0, len(stored), 256):
        store(manager, stored[at : at + 256])
    gc.collect()
    gc.freeze()  # as vLLM does
    taken: defaultdict[str, list[float]] = defaultdict(list)
    assert manager.link is not None
    server, _, _ = struct.unpack("iII", manager.link.channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    chosen = random.Random(1)
    for number in range(count):
        first = chosen.randrange(len(stored) - KEYS)
        # As an engine makes them when a request arrives: no key has been hashed before.
        wanted = [make_offload_key(hashes[at : at + 32], 0) for at in range(32 * first, 32 * (first + KEYS), 32)]
        context = ReqContext(f"request-{number}")
        queued_s = run_queue_s(os.getpid(), server)
        manager.on_new_request(context)
        began_s = time.perf_counter()
        manager.prefetch(wanted, context)
        sent_s = time.perf_counter() - began_s
        if number % 2:  # the answer is read as soon as it comes
            acquire_s = answered_s(manager, wanted, context) - began_s
            taken["acquire_us"].append(acquire_s)
            taken["acquire_alone_us"].append(acquire_s - (run_queue_s(os.getpid(), server) - queued_s))
        else:  # or a step later
            time.sleep(STEP_S)
            began_s = time.perf_counter()
            manager.poll()
            taken["scheduler_us"].append(sent_s + time.perf_counter() - began_s)
            began_s = time.perf_counter()
            manager.lookup_many(wanted, context)
            taken["lookups_us"].append(time.perf_counter() - began_s)
        while manager.lookup_many(wanted, context).count(True) < KEYS:
            manager.poll()
        manager.on_request_finished(context)
        manager.on_schedule_end()
        time.sleep(STEP_S)
    manager.shutdown()
    return taken


def answered_s(manager: AttachedManager, wanted: Sequence[OffloadKey], context: ReqContext) -> float:
    """Wait for the answer to a request, and return when it had been read."""
    assert manager.link is not None
    while True:
        select.select([manager.link.channel.sock], [], [])  # rows to write may come first
        manager.poll()
        read_s = time.perf_counter()
        if manager.has_row(wanted[0], context):
            return read_s


def run_queue_s(*processes: int) -> float:
    """Return how long the main threads of processes have stood ready and not run."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in processes) * 1e-9


def attached(address: str) -> AttachedManager:
    attachment = Attachment(address, Hello(f"engine-{os.getpid()}", "scheduler"), maps_rows=False)
    assert attachment.connect()
    return AttachedManager(attachment)


def store(manager: AttachedManager, keys: Sequence[OffloadKey]) -> None:
    context = ReqContext(f"store-{keys[0].hex()}")
    manager.on_new_request(context)
    while (output := manager.prepare_store(keys, context)) is None:
        manager.on_schedule_end()
        time.sleep(0.0002)
    manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    manager.on_schedule_end()


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = sorted(seconds)
    names = {"median": 50, "p90": 90, "p99": 99}
    return {name: round(values[len(values) * at // 100] * 1e6, 1) for name, at in names.items()}


if __name__ == "__main__":
    main()
