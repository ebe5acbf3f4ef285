"""The contract of a worker's transfer handler: copies of blocks, submitted without waiting and reported once.

Names follow vLLM v1's `vllm.v1.kv_offload.worker`, so that an engine written for it finds what it expects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tiered_kv.base import GPULoadStoreSpec, LoadStoreSpec
from tiered_kv.mediums import CPULoadStoreSpec

TransferSpec = tuple[object, object]
"""Where the blocks lie and where they go: the source's load/store spec and the destination's."""

TransferType = tuple[str, str]
"""The mediums of source and destination: ("GPU", "CPU") is a store, ("CPU", "GPU") a load."""

STORE: TransferType = (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())
LOAD: TransferType = (CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())


@dataclass
class TransferResult:
    """How a transfer ended. Once it is reported, nothing touches its blocks any more.

    Args:
        job_id: The job.
        success: Whether every byte was copied. After a failure the destination holds anything.
        transfer_size: Bytes of the job.
        transfer_time: Seconds from its first copy to its last, waiting in the queue left out; None if it failed.
        transfer_type: The direction.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None


class OffloadingHandler(ABC):
    """Copies blocks in one direction. One thread calls all methods; it may be another for each handler."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a transfer, behind those that were begun before it, and return at once.

        Args:
            job_id: The job's name in its `TransferResult`; not that of a job which is still to be reported.
            spec: Source and destination.

        Returns:
            True: the transfer will be reported by `get_finished`.

        Raises:
            TypeError, ValueError: The specs do not fit each other, or name blocks that are not there. Nothing was
                copied, and nothing will be reported.
            ShutdownError: The handler was shut down.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that ended since the last call, each once, in the order of their submission."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these transfers have ended; `get_finished` still reports them.

        Jobs that are unknown, or were reported, are over. The wait has no timeout: a copy between two memories ends.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End: wait for the copies that run, begin no other, and let go of all memory. A second call does nothing.

        What had not begun is reported as failed.
        """


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
        """Shut both down, the second also where the first fails."""
        try:
            self.store.shutdown()
        finally:
            self.load.shutdown()
