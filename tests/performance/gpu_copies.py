"""How fast blocks are copied between a device and the primary tier, beside plain copies of as many bytes: JSON.

    python tests/performance/gpu_copies.py [--device cuda|cpu] [--mib 256] [--rounds 5]

Stores and loads blocks that lie scattered on both sides, so that no two pages are neighbours, and compares every byte.
The plain copy is one contiguous copy in each direction, from and to pinned memory where the device is a GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from tests.performance.bench import command_line, timed
from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker import OffloadingHandler, TransferSpec, open_handlers

PAGES_BYTES = (16 << 10, 64 << 10, 2 << 20)
"""A page is what one layer stores of one block."""
NUM_LAYERS = 4
NUM_JOBS = 8
"""Jobs that are in flight together, so that one is planned while those before it are copied."""


def measure(device: str, page_bytes: int, total_bytes: int, rounds: int) -> dict[str, float]:
    """Return GB/s: medians of the handlers' rounds, and the best round of the plain copies."""
    num_blocks = max(NUM_JOBS, total_bytes // (NUM_LAYERS * page_bytes))
    caches = [torch.randint(0, 256, (num_blocks, page_bytes), dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    tensors = [cache.to(device) for cache in caches]
    canonical = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
        [[CanonicalKVCacheRef(layer, page_bytes) for layer in range(NUM_LAYERS)]],
    )
    region = PrimaryRegion(num_blocks, NUM_LAYERS * page_bytes, prefault=True)
    handlers = open_handlers(canonical, region)
    host = torch.zeros(region.array.nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    plain = host.to(device)
    jobs = scattered_jobs(num_blocks)
    back = [(rows, blocks) for blocks, rows in jobs]
    seconds: dict[str, list[float]] = {name: [] for name in ("store", "load", "plain_store", "plain_load")}
    try:
        for _ in range(rounds):
            seconds["plain_store"].append(timed(lambda: copy(host, plain)).wall_s)
            seconds["store"].append(timed(lambda: run(handlers.store, jobs)).wall_s)
            for tensor in tensors:
                tensor.zero_()
            seconds["plain_load"].append(timed(lambda: copy(plain, host)).wall_s)
            seconds["load"].append(timed(lambda: run(handlers.load, back)).wall_s)
            assert all(torch.equal(tensor.cpu(), cache) for tensor, cache in zip(tensors, caches, strict=True))
    finally:
        handlers.shutdown()
        region.close()
    gigabytes = NUM_LAYERS * page_bytes * num_blocks / 1e9
    best = {name: min if name.startswith("plain") else statistics.median for name in seconds}
    return {f"{name}_gb_per_s": gigabytes / best[name](times) for name, times in seconds.items()}


def scattered_jobs(num_blocks: int) -> list[TransferSpec]:
    """Return stores that together copy every block once, in an order without neighbours on either side."""
    random = np.random.default_rng(0)
    blocks = np.array_split(random.permutation(num_blocks), NUM_JOBS)
    rows = np.array_split(random.permutation(num_blocks), NUM_JOBS)
    return [
        (GPULoadStoreSpec(job_blocks, [len(job_blocks)]), CPULoadStoreSpec(job_rows))
        for job_blocks, job_rows in zip(blocks, rows, strict=True)
    ]


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)
    if source.is_cuda or destination.is_cuda:
        torch.cuda.synchronize()


def run(handler: OffloadingHandler, jobs: Sequence[TransferSpec]) -> None:
    for job_id, spec in enumerate(jobs):
        handler.transfer_async(job_id, spec)
    handler.wait(range(len(jobs)))
    assert all(result.success for result in handler.get_finished())


def main() -> None:
    parser = command_line(__doc__, mib=256, rounds=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    sizes = {str(page): measure(args.device, page, args.mib << 20, args.rounds) for page in PAGES_BYTES}
    print(json.dumps({"device": args.device, "page_bytes": sizes}, indent=2))


if __name__ == "__main__":
    main()
