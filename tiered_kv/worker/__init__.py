"""The worker's half of offloading: copies between a device's KV cache and the primary tier (extra `torch`).

    handlers = open_handlers(kv_caches, stack.region)           # an engine in one process
    shared = SharedStack("stack.yaml", name=..., bytes_per_worker=..., num_workers=2)   # scheduler and workers apart

Importing this package does not import torch. Functions that need torch import it when they run.
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
