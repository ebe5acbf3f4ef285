"""What a host's cache costs an engine: `python tests/performance/host_cache.py [--requests N]`.

It starts `tiered-kv serve`, attaches as an engine, and prints percentiles in microseconds for a request of 512 keys.
All of them are stored. A pause between requests stands for an engine's step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.server.attach import Attachment
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.protocol import Hello

ROWS, ROW_BYTES, KEYS = 65_536, 4096, 512
STEP_S = 0.003
_PROGRAM = "import sys; from tiered_kv.cli import main; sys.exit(main())"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    count = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as directory:
        stack, path = Path(directory, "stack.yaml"), Path(directory, "cache.sock")
        stack.write_text(
            f"namespace: {{model: m}}\nblock: {{bytes: {ROW_BYTES}}}\nprimary: {{capacity: {ROWS * ROW_BYTES}}}\n"
        )
        command = [sys.executable, "-c", _PROGRAM, "serve", str(stack), "--socket", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
            assert server.stdout is not None
            server.stdout.readline()
            try:
                print(json.dumps(measure(f"unix:{path}", count), indent=2))
            finally:
                server.send_signal(signal.SIGTERM)


def measure(address: str, count: int) -> dict[str, dict[str, float]]:
    manager = attached(address)
    raw = np.random.default_rng(1).bytes(32 * ROWS)
    keys = [make_offload_key(raw[at : at + 32], 0) for at in range(0, len(raw), 32)]
    stored = keys[: ROWS // 2]
    for at in range(0, len(stored), 256):
        store(manager, stored[at : at + 256])
    acquire: list[float] = []
    share: list[float] = []
    chosen = random.Random(1)
    for number in range(count):
        first = chosen.randrange(len(stored) - KEYS)
        wanted, context = stored[first : first + KEYS], ReqContext(f"request-{number}")
        manager.on_new_request(context)
        began_s = time.perf_counter()
        manager.prefetch(wanted, context)
        sent_s = time.perf_counter() - began_s
        if number % 2:  # the answer is read as soon as it comes
            assert manager.link is not None
            select.select([manager.link.channel.sock], [], [])
            manager.poll()
            acquire.append(time.perf_counter() - began_s)
        else:  # or a step later
            time.sleep(STEP_S)
            began_s = time.perf_counter()
            manager.poll()
            share.append(sent_s + time.perf_counter() - began_s)
        while manager.lookup_many(wanted, context).count(True) < KEYS:
            manager.poll()
        manager.on_request_finished(context)
        manager.on_schedule_end()
        time.sleep(STEP_S)
    manager.shutdown()
    return {"acquire_us": percentiles(acquire), "scheduler_us": percentiles(share)}


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
