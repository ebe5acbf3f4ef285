"""One process of an engine that obeys: `python engine_part.py ROLE SETTINGS`, where ROLE is `scheduler` or a rank.

Each line of standard input is a JSON list, a command and its arguments; its answer is one line of JSON. Not a test:
test_three_processes.py starts it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np

from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker import SharedStack

FACTOR = 2
PAGES_BYTES = (1024, 512)
NUM_GPU_BLOCKS = 16


def key_of(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)


def open_shared(settings: dict[str, Any]) -> SharedStack:
    return SharedStack(
        settings["stack"],
        name=settings["name"],
        bytes_per_worker=FACTOR * sum(PAGES_BYTES),
        num_workers=settings["num_workers"],
        block_size_factor=FACTOR,
    )


class Scheduler:
    """Decides; a request is a batch of keys."""

    def __init__(self, shared: SharedStack) -> None:
        self.stack = shared.open_stack()
        self.manager = self.stack.manager
        self.request = ReqContext()

    def prepare_store(self, numbers: list[int]) -> list[int] | None:
        self.request = ReqContext(req_id=f"store {numbers}")
        self.manager.on_new_request(self.request)
        output = self.manager.prepare_store([key_of(number) for number in numbers], self.request)
        if output is None:
            return None
        assert len(output.keys_to_store) == len(numbers)
        return self.rows_of(output.store_spec)

    def complete_store(self, numbers: list[int]) -> bool:
        self.manager.complete_store([key_of(number) for number in numbers], self.request)
        self.manager.on_request_finished(self.request)
        self.manager.on_schedule_end()
        return self.manager.drain_jobs(timeout_s=120)

    def prepare_load(self, numbers: list[int]) -> list[int] | None:
        """Return the rows, or None where a block is lost."""
        self.request = ReqContext(req_id=f"load {numbers}")
        self.manager.on_new_request(self.request)
        keys = [key_of(number) for number in numbers]
        end_s = time.monotonic() + 120
        while None in (answers := self.manager.lookup_many(keys, self.request)):
            assert time.monotonic() < end_s
            self.manager.on_schedule_end()
            time.sleep(0.001)
        return self.rows_of(self.manager.prepare_load(keys, self.request)) if all(answers) else None

    def complete_load(self, numbers: list[int]) -> None:
        self.manager.complete_load([key_of(number) for number in numbers], self.request)
        self.manager.on_request_finished(self.request)
        self.manager.on_schedule_end()

    def counters(self) -> dict[str, dict[str, Any]]:
        return self.stack.counters()

    def close(self) -> None:
        self.stack.close()

    @staticmethod
    def rows_of(spec: Any) -> list[int]:
        rows: list[int] = spec.block_ids.tolist()
        return rows


class Worker:
    """Copies: two tensors, and blocks whose bytes are a function of key, rank and place."""

    def __init__(self, shared: SharedStack, rank: int) -> None:
        import torch  # here, since the scheduler needs none

        self.rank = rank
        self.tensors = [torch.zeros((NUM_GPU_BLOCKS, size), dtype=torch.uint8) for size in PAGES_BYTES]
        self.arrays = [tensor.numpy() for tensor in self.tensors]
        """The same memory, to compute in and to compare."""
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, size) for tensor, size in zip(self.tensors, PAGES_BYTES, strict=True)],
            [[CanonicalKVCacheRef(index, size) for index, size in enumerate(PAGES_BYTES)]],
        )
        self.handlers = shared.open_handlers(caches, rank)
        self.num_jobs = 0

    def compute(self, numbers: list[int], blocks: list[int]) -> None:
        """Fill the GPU blocks of the offloaded blocks `numbers`."""
        for place, block in enumerate(blocks):
            for index, array in enumerate(self.arrays):
                array[block] = self.content(numbers[place // FACTOR], place % FACTOR, index)

    def check(self, numbers: list[int], blocks: list[int]) -> list[int]:
        """Return which of `numbers` have other bytes than they must have."""
        wrong = set()
        for place, block in enumerate(blocks):
            for index, array in enumerate(self.arrays):
                if (array[block] != self.content(numbers[place // FACTOR], place % FACTOR, index)).any():
                    wrong.add(numbers[place // FACTOR])
        return sorted(wrong)

    def content(self, number: int, page: int, tensor: int) -> Any:
        digest = hashlib.shake_128(f"{number} {self.rank} {page} {tensor}".encode()).digest(PAGES_BYTES[tensor])
        return np.frombuffer(digest, dtype=np.uint8)

    def store(self, blocks: list[int], rows: list[int]) -> bool:
        handler, spec = self.handlers.store, (GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(rows))
        return self._run(handler, spec)

    def load(self, rows: list[int], blocks: list[int]) -> bool:
        handler, spec = self.handlers.load, (CPULoadStoreSpec(rows), GPULoadStoreSpec(blocks, [len(blocks)], [0]))
        return self._run(handler, spec)

    def close(self) -> None:
        self.handlers.shutdown()

    def _run(self, handler: Any, spec: tuple[object, object]) -> bool:
        self.num_jobs += 1
        handler.transfer_async(self.num_jobs, spec)
        handler.wait([self.num_jobs])
        (result,) = handler.get_finished()
        assert result.job_id == self.num_jobs
        return bool(result.success)


def main() -> None:
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    shared = open_shared(settings)
    part: Any = Scheduler(shared) if role == "scheduler" else Worker(shared, int(role))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(part, command)(*arguments)), flush=True)
        if command == "close":
            break


if __name__ == "__main__":
    main()
