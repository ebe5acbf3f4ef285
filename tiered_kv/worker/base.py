"""A worker's two directions; the contract of a handler, `OffloadingHandler`, is in `tiered_kv.base`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiered_kv.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingHandler, TransferType
from tiered_kv.mediums import CPULoadStoreSpec

STORE: TransferType = (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())
LOAD: TransferType = (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())


@dataclass(frozen=True, slots=True)
class WorkerHandlers:
    """A worker's two directions.

    Args:
        store: From the device's KV cache to the primary tier's region.
        load: From the region to the device.
    """

    store: OffloadingHandler
    load: OffloadingHandler

    def triples(self) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield (source spec type, destination spec type, handler), as `OffloadingSpec.get_handlers` does."""
        yield GPULoadStoreSpec, CPULoadStoreSpec, self.store
        yield CPULoadStoreSpec, GPULoadStoreSpec, self.load

    def shutdown(self) -> None:
        """Shut both down; the second even if the first raises."""
        try:
            self.store.shutdown()
        finally:
            self.load.shutdown()
