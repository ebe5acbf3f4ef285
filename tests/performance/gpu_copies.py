"""How fast blocks are copied between a device and the primary tier, beside plain copies of as many bytes: JSON.

    python tests/performance/gpu_copies.py [--device cuda|cpu] [--mib 256] [--rounds 5] [--pages 4,8,16,32,64,2048]

Stores and loads blocks that lie scattered on both sides, so that no two pages are neighbours, and compares every byte.
The plain copy is one contiguous copy in each direction, from and to pinned memory where the device is a GPU. There the
driver, the kernel, and whichever of them the handlers choose copy short pages. `beside` has how many times as long a
matrix product takes while copies run, and their rate then.
"""

from __future__ import annotations

import functools
import json
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.performance.bench import command_line, timed
from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker import OffloadingHandler, TransferSpec, open_handlers
from tiered_kv.worker.cuda import SHORT_RUN_BYTES, CudaCopier
from tiered_kv.worker.plan import LOAD, STORE, CopyPlan
from tiered_kv.worker.short_runs import KernelCopies

PAGES_KIB = (4, 8, 16, 32, 64, 2048)
"""A page is what one layer stores of one block."""
NUM_LAYERS = 4
NUM_JOBS = 8
"""Jobs that are in flight together, so that one is planned while those before it are copied."""
WAYS = ("chosen", "driver", "kernel")
PRODUCT_SIZE = 8192


def measure(device: str, page_bytes: int, total_bytes: int, rounds: int, way: str = "chosen") -> dict[str, float]:
    """Return GB/s: medians of the handlers' rounds, and the best round of the plain copies."""
    num_blocks = max(NUM_JOBS, total_bytes // (NUM_LAYERS * page_bytes))
    caches = [torch.randint(0, 256, (num_blocks, page_bytes), dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    tensors = [cache.to(device) for cache in caches]
    canonical = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
        [[CanonicalKVCacheRef(layer, page_bytes) for layer in range(NUM_LAYERS)]],
    )
    region = PrimaryRegion(num_blocks, NUM_LAYERS * page_bytes, prefault=True)
    with choosing(way):
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
    return {f"{name}_gb_per_s": round(gigabytes / best[name](times), 3) for name, times in seconds.items()}


def choosing(way: str) -> Any:  # Any: the patch
    """Return the context in which handlers are opened that copy short runs in a way of `WAYS`."""
    if way == "chosen":
        return mock.patch.dict({})

    def choose(device: torch.device, *_: object) -> dict[Any, KernelCopies]:
        return {} if way == "driver" else dict.fromkeys((STORE, LOAD), KernelCopies(device, 16))

    return mock.patch("tiered_kv.worker.handlers.choose_kernels", choose)


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


class Pages:
    """Pinned memory, the device's, and plans of scattered pages between them."""

    def __init__(self, total_bytes: int) -> None:
        self.host = torch.zeros(total_bytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.randint(0, 256, (total_bytes,), dtype=torch.uint8).to("cuda")

    def plans(self, page_bytes: int) -> dict[str, CopyPlan]:
        random = np.random.default_rng(0)
        order = page_bytes * random.permutation(len(self.host) // page_bytes)
        device, host = self.device.data_ptr() + order, self.host.data_ptr() + page_bytes * np.arange(len(order))
        lengths = np.full(len(order), page_bytes, dtype=np.int64)
        return {"store": CopyPlan(device, host, lengths), "load": CopyPlan(host, device, lengths)}


class Product:
    """A matrix product, in the place of a model."""

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
        self.out = torch.empty_like(self.a)

    def mean_ms(self, is_over: Callable[[int], bool]) -> float:
        """Return the mean time of the products that ended before `is_over`, which is given their number."""
        begin = torch.cuda.Event(enable_timing=True)
        ends: list[Any] = []  # Any: torch.cuda.Event
        begin.record()
        while not ends or not is_over(len(ends)):
            torch.mm(self.a, self.b, out=self.out)
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if len(ends) > 1:
                ends[-2].synchronize()  # one is queued behind the one that runs
        torch.cuda.synchronize()
        counted = ends[: max(1, len(ends) - 2)]
        return float(begin.elapsed_time(counted[-1])) / len(counted)

    def slowdown(self, copier: CudaCopier, plan: CopyPlan) -> dict[str, float]:
        """Return how many times as long a product takes while copies run, and the copies' GB/s meanwhile."""
        self.mean_ms(lambda count: count == 3)
        alone_ms = self.mean_ms(lambda count: count == 14)
        copies = [copier.submit(plan) for _ in range(max(1, (2 << 30) // plan.total_bytes))]
        beside_ms = self.mean_ms(lambda _: copies[-1].has_ended())
        seconds = sum(each.seconds() or float("nan") for each in copies)
        return {
            "product": round(beside_ms / alone_ms, 3),
            "gb_per_s": round(len(copies) * plan.total_bytes / seconds / 1e9, 1),
        }


def beside(pages_kib: Sequence[int], total_bytes: int) -> Iterator[tuple[str, Any]]:
    """Yield the slowdown of a product beside the copies of each way."""
    pages, product = Pages(total_bytes), Product()
    for way in WAYS[1:]:
        kernel = KernelCopies(torch.device("cuda"), 16) if way == "kernel" else None
        copier = CudaCopier(torch.device("cuda"), kernel=kernel)
        for page_kib in pages_kib:
            for name, plan in pages.plans(page_kib << 10).items():
                key = f"{way} {name} {page_kib}"
                yield key, attempted(functools.partial(product.slowdown, copier, plan))


def attempted(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or the traceback of its error."""
    try:
        return work()
    except Exception:  # the other figures are wanted all the same
        return traceback.format_exc().splitlines()[-6:]


def pages_of(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = command_line(__doc__, mib=256, rounds=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--pages", type=pages_of, default=PAGES_KIB, metavar="KIB,KIB")
    args = parser.parse_args()
    sizes: dict[str, Any] = {}
    for kib in args.pages:
        has_choice = args.device == "cuda" and kib << 10 < SHORT_RUN_BYTES
        sizes[str(kib << 10)] = {
            way: attempted(functools.partial(measure, args.device, kib << 10, args.mib << 20, args.rounds, way))
            for way in (WAYS if has_choice else WAYS[:1])
        }
    printed = {"device": args.device, "page_bytes": sizes}
    if args.device == "cuda":
        printed["beside"] = dict(beside(args.pages, args.mib << 20))
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
