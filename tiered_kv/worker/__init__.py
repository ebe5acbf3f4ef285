"""The worker's half of offloading: copies between a device's KV cache and the primary tier (extra `torch`).

    handlers = open_handlers(kv_caches, stack.region)           # an engine in one process
    shared = SharedStack("stack.yaml", name=..., bytes_per_worker=..., num_workers=2)   # scheduler and workers apart

An engine's worker process calls the handlers on its own thread: it submits transfers and asks which have ended. What
must stay true: a transfer reads and writes only the rows that the manager has pinned for it, and the worker never
touches the manager. Importing this package does not import torch. Functions that need torch import it when they run.

handlers     the interface of an engine's worker, over a region
plan         where a block's bytes lie on the device and in a row, and what to copy
cuda         the copies on a CUDA device
cpu          the copies within CPU memory
kernel       the kernel for short runs of bytes
short_runs   whether the driver or the kernel copies short runs
shared       one stack and one region for several processes
shared_file  the file by which these processes find each other
"""

from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)
from tiered_kv.worker.handlers import WorkerHandlers, open_handlers
from tiered_kv.worker.shared import SharedStack, TieredOffloadingSpec

__all__ = [
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "OffloadingHandler",
    "SharedStack",
    "TieredOffloadingSpec",
    "TransferResult",
    "TransferSpec",
    "TransferType",
    "WorkerHandlers",
    "open_handlers",
]
