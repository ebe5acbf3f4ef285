"""A scheduler here, and two workers as real processes: what was stored comes back byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.stack.facade import rows_of
from tiered_kv.stack.open import EngineStack
from tiered_kv.testing.rig import make_keys
from tiered_kv.worker import SharedStack

pytest.importorskip("torch")

NUM_WORKERS = 2
PAGE_BYTES = 4096
BATCH = 4
NUM_BLOCKS = 40
PRIMARY_BLOCKS = 16
WAIT_S = 120.0

WORKER = """
import json, sys
import torch
from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker import SharedStack

rank, settings = int(sys.argv[1]), json.loads(sys.argv[2])
cache = torch.zeros((16, settings["bytes_per_worker"]), dtype=torch.uint8)
caches = CanonicalKVCaches(
    [CanonicalKVCacheTensor(cache, cache.shape[1])], [[CanonicalKVCacheRef(0, cache.shape[1])]]
)
handlers = SharedStack(**settings).open_handlers(caches, rank)

def content(number):  # of a block: a function of its number and the rank
    random = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(0, 256, (cache.shape[1],), generator=random, dtype=torch.uint8)

print("ready", flush=True)
for job, line in enumerate(sys.stdin):
    verb, numbers, blocks, rows = json.loads(line)
    device, region = GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(rows)
    for number, block in zip(numbers, blocks):
        cache[block] = content(number) if verb == "store" else 0
    handler = getattr(handlers, verb)
    handler.transfer_async(job, (device, region) if verb == "store" else (region, device))
    handler.wait([job])
    is_right = all(torch.equal(cache[block], content(number)) for number, block in zip(numbers, blocks))
    print([result.success for result in handler.get_finished()] == [True] and is_right, flush=True)
handlers.shutdown()
"""


class Engine:
    def __init__(self, stack: EngineStack, workers: Sequence[subprocess.Popen[str]]) -> None:
        self.stack = stack
        self.workers = workers

    def transfer(self, verb: str, numbers: Sequence[int], blocks: Sequence[int], spec: object) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            print(json.dumps([verb, numbers, blocks, rows_of(spec)]), file=worker.stdin, flush=True)
        for worker in self.workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "True\n"

    def store(self, keys: Sequence[OffloadKey], numbers: Sequence[int], blocks: Sequence[int]) -> None:
        manager, request = self.stack.manager, ReqContext(req_id=f"store {numbers}")
        manager.on_new_request(request)
        output = manager.prepare_store(keys, request)
        assert output is not None
        assert output.keys_to_store == keys
        self.transfer("store", numbers, blocks, output.store_spec)
        manager.complete_store(keys, request)
        manager.on_request_finished(request)
        manager.on_schedule_end()
        assert manager.drain_jobs(timeout_s=WAIT_S)

    def load_and_check(self, keys: Sequence[OffloadKey], numbers: Sequence[int], blocks: Sequence[int]) -> None:
        manager, request = self.stack.manager, ReqContext(req_id=f"load {numbers}")
        manager.on_new_request(request)
        end_s = time.monotonic() + WAIT_S
        while None in (answers := manager.lookup_many(keys, request)):
            assert time.monotonic() < end_s
            manager.on_schedule_end()
            time.sleep(0.001)
        assert all(answers), "no block was lost"
        self.transfer("load", numbers, blocks, manager.prepare_load(keys, request))
        manager.complete_load(keys, request)
        manager.on_request_finished(request)
        manager.on_schedule_end()


@contextmanager
def engine_at(directory: Path, *, workers_first: bool) -> Iterator[Engine]:
    """Start the processes; the workers are killed at the end."""
    block_bytes = NUM_WORKERS * PAGE_BYTES
    settings: dict[str, Any] = {
        "source": {
            "namespace": {"model": "test", "parallel": {"tensor": NUM_WORKERS}},
            "block": {"bytes": block_bytes},
            "primary": {"capacity": PRIMARY_BLOCKS * block_bytes},
            "secondary": [{"type": "nvme", "path": str(directory), "capacity": "64MiB"}],
        },
        "name": f"tiered-kv-test-{uuid.uuid4().hex}",
        "bytes_per_worker": PAGE_BYTES,
        "num_workers": NUM_WORKERS,
    }
    stack = None if workers_first else SharedStack(**settings).open_engine_stack()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_WORKERS)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        stack = stack or SharedStack(**settings).open_engine_stack()
        yield Engine(stack, workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        if stack is not None:
            stack.close()


@pytest.mark.slow
def test_blocks_survive_eviction_and_a_restart_of_every_process(tmp_path: Path) -> None:
    keys = make_keys(NUM_BLOCKS, "a prompt")
    batches = [range(first, first + BATCH) for first in range(0, NUM_BLOCKS, BATCH)]
    with engine_at(tmp_path, workers_first=True) as engine:  # as vLLM starts them
        for batch in batches:
            engine.store(keys[batch.start : batch.stop], [*batch], [3, 9, 8, 15])
        counters = engine.stack.counters()
        assert counters["cpu"]["evicted_blocks_total"] >= NUM_BLOCKS - PRIMARY_BLOCKS
        for batch in batches:
            engine.load_and_check(keys[batch.start : batch.stop], [*batch], [7, 5, 1, 0])
    with engine_at(tmp_path, workers_first=False) as engine:
        for batch in reversed(batches):
            engine.load_and_check(keys[batch.start : batch.stop], [*batch], [0, 1, 12, 13])
        assert engine.stack.counters()["nvme"]["loaded_blocks_total"] == NUM_BLOCKS, "the primary tier began empty"
