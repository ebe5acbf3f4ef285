"""How fast the handlers copy, beside the best plain copy of as many bytes on the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferSpec,
)
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError, MissingExtraError, TieredKVError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker.handlers import open_handlers

if TYPE_CHECKING:
    import torch

PAGES_BYTES = (16 << 10, 64 << 10, 2 << 20)
"""A page is what one layer stores of one block."""
NUM_LAYERS = 4
NUM_JOBS = 8
"""Jobs that are in flight together, so that one is planned while those before it are copied."""
DEFAULT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CopyRates:
    """What was measured for pages of one size.

    Args:
        page_bytes: Of one layer, in one block.
        store_gb_per_s: Median of the stores' rounds, from the first job's submission to the last one's end.
        load_gb_per_s: Likewise.
        plain_store_gb_per_s: The best round of one contiguous copy of as many bytes, from the device.
        plain_load_gb_per_s: The same, to the device.
    """

    page_bytes: int
    store_gb_per_s: float
    load_gb_per_s: float
    plain_store_gb_per_s: float
    plain_load_gb_per_s: float

    @property
    def store_ratio(self) -> float:
        """The store's rate over that of the plain copy."""
        return self.store_gb_per_s / self.plain_store_gb_per_s

    @property
    def load_ratio(self) -> float:
        """The load's rate over that of the plain copy."""
        return self.load_gb_per_s / self.plain_load_gb_per_s

    def as_json(self) -> dict[str, object]:
        """Return all figures, by name."""
        return {**asdict(self), "store_ratio": self.store_ratio, "load_ratio": self.load_ratio}


def measure_copies(
    device: str, *, pages_bytes: Sequence[int] = PAGES_BYTES, total_bytes: int = DEFAULT_BYTES, rounds: int = 5
) -> list[CopyRates]:
    """Measure stores and loads of blocks that lie scattered on both sides, so that no two pages are neighbours.

    Args:
        device: "cuda", or "cpu" for copies within the CPU's memory.
        pages_bytes: Sizes of a page; each is measured.
        total_bytes: What the jobs of a round copy; the device's memory must hold it twice, and the CPU's three times.
        rounds: Repetitions, plain and scattered in turns.

    Raises:
        MissingExtraError: torch is not installed.
        ConfigError: There is no such device.
        TieredKVError: A load brought back other bytes than were stored.
    """
    device_name(device)
    return [_measure(device, page_bytes, total_bytes, rounds) for page_bytes in pages_bytes]


def device_name(device: str) -> str:
    """Return what a person calls `device`.

    Raises:
        MissingExtraError: torch is not installed.
        ConfigError: There is no such device.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("measuring copies", "torch") from error
    if device == "cpu":
        return "the CPU's memory"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is no GPU here that torch {torch.__version__} can use; "
            "'--gpu cpu' measures the same copies within the CPU's memory"
        )
    name: str = torch.cuda.get_device_name()
    return name


def _measure(device: str, page_bytes: int, total_bytes: int, rounds: int) -> CopyRates:
    import torch

    num_blocks = max(NUM_JOBS, total_bytes // (NUM_LAYERS * page_bytes))
    caches = [torch.randint(0, 256, (num_blocks, page_bytes), dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    tensors = [cache.to(device) for cache in caches]
    canonical = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
        [[CanonicalKVCacheRef(layer, page_bytes) for layer in range(NUM_LAYERS)]],
    )
    region = PrimaryRegion(num_blocks, NUM_LAYERS * page_bytes, prefault=True)
    handlers = open_handlers(canonical, region)
    try:
        jobs = _scattered_jobs(num_blocks)
        plain = _PlainCopies(device, region.array.nbytes)
        stores, loads, plain_stores, plain_loads = [], [], [], []
        for _ in range(rounds):
            plain_stores.append(_seconds(plain.store))
            stores.append(_seconds(lambda: _run(handlers.store, jobs)))
            for tensor in tensors:
                tensor.zero_()
            plain.synchronize()
            plain_loads.append(_seconds(plain.load))
            loads.append(_seconds(lambda: _run(handlers.load, [(rows, blocks) for blocks, rows in jobs])))
            if not all(torch.equal(tensor.cpu(), cache) for tensor, cache in zip(tensors, caches, strict=True)):
                raise TieredKVError(f"blocks with pages of {page_bytes} bytes came back other than they were stored")
    finally:
        handlers.shutdown()
        region.close()
    gigabytes = NUM_LAYERS * page_bytes * num_blocks / 1e9
    return CopyRates(
        page_bytes,
        store_gb_per_s=gigabytes / statistics.median(stores),
        load_gb_per_s=gigabytes / statistics.median(loads),
        plain_store_gb_per_s=gigabytes / min(plain_stores),
        plain_load_gb_per_s=gigabytes / min(plain_loads),
    )


class _PlainCopies:
    """One contiguous copy in each direction, from and to pinned memory where the device is a GPU."""

    def __init__(self, device: str, size_bytes: int) -> None:
        import torch

        is_gpu = device == "cuda"
        self._host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._device = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self.synchronize: Callable[[], None] = torch.cuda.synchronize if is_gpu else lambda: None

    def store(self) -> None:
        self._copy(self._host, self._device)

    def load(self) -> None:
        self._copy(self._device, self._host)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)
        self.synchronize()


def _scattered_jobs(num_blocks: int) -> list[TransferSpec]:
    """Return stores that together copy every block once, in an order without neighbours on either side."""
    random = np.random.default_rng(0)
    blocks = np.array_split(random.permutation(num_blocks), NUM_JOBS)
    rows = np.array_split(random.permutation(num_blocks), NUM_JOBS)
    return [
        (GPULoadStoreSpec(job_blocks, [len(job_blocks)]), CPULoadStoreSpec(job_rows))
        for job_blocks, job_rows in zip(blocks, rows, strict=True)
    ]


def _run(handler: OffloadingHandler, jobs: Sequence[TransferSpec]) -> None:
    for job_id, spec in enumerate(jobs):
        handler.transfer_async(job_id, spec)
    handler.wait(range(len(jobs)))
    if not all(result.success for result in handler.get_finished()):
        raise TieredKVError("a copy failed; the log says why")


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
