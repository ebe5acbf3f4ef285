"""The handlers of a worker: one copies from the device to the region, the other back. The device may be the CPU.

The engine's worker process calls them on its own thread: it submits transfers, and asks which have ended. A transfer
touches only the rows and pages of its plan, each transfer is reported once, and after `shutdown` no copy runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tiered_kv.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
    TransferType,
)
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ShutdownError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker.cpu import CpuCopier, CpuCopy
from tiered_kv.worker.cuda import CudaCopier, CudaCopy, Kernel
from tiered_kv.worker.plan import LOAD, STORE, BlockLayout, device_of, lay_out, plan_transfer
from tiered_kv.worker.short_runs import choose_kernels


@dataclass(frozen=True, slots=True)
class WorkerHandlers:
    """A worker's two directions: `store` from the device's KV cache to the primary tier's region, `load` back."""

    store: OffloadingHandler
    load: OffloadingHandler

    def triples(self) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield (source spec type, destination spec type, handler); see `OffloadingSpec.get_handlers`."""
        yield GPULoadStoreSpec, CPULoadStoreSpec, self.store
        yield CPULoadStoreSpec, GPULoadStoreSpec, self.load

    def shutdown(self) -> None:
        """Shut both handlers down; the second also if the first fails."""
        try:
            self.store.shutdown()
        finally:
            self.load.shutdown()


def open_handlers(
    kv_caches: CanonicalKVCaches,
    region: PrimaryRegion,
    *,
    block_size_factor: int = 1,
    part_offset: int = 0,
    part_bytes: int | None = None,
    check: Callable[[], object] = lambda: None,
    on_shutdown: Callable[[], object] = lambda: None,
) -> WorkerHandlers:
    """Return handlers that copy between `kv_caches` and `region`.

    Args:
        kv_caches: All on one CUDA device, or all in CPU memory. Their addresses must not change until shutdown.
        region: The primary tier's memory, pinned here where the caches are on a CUDA device. It belongs to the
            caller. It is unmapped only after both handlers have been shut down, even if it is closed before.
        block_size_factor: Device blocks in an offloaded block.
        part_offset: Where this worker's part of a row begins, in bytes.
        part_bytes: Bytes of that part; by default the rest of the row.
        check: Called before each transfer; its exception refuses the transfer.
        on_shutdown: Called when both handlers have been shut down.

    Raises:
        ValueError: The caches contradict themselves, do not fit into the part, or are on a device that cannot be used.
        ConfigError: CUDA cannot pin the region.
    """
    device = device_of(kv_caches)
    layout = lay_out(
        kv_caches, region, block_size_factor=block_size_factor, part_offset=part_offset, part_bytes=part_bytes
    )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"KV caches on '{device}' cannot be offloaded, only those on CUDA devices and in CPU memory")
    kernels: Mapping[TransferType, Kernel] = {}
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):  # otherwise CUDA would create a second context, on the thread's device
            region.pin()
            kernels = choose_kernels(device, layout, region.array.ctypes.data)
    memory = (kv_caches, region.array)
    users = {STORE, LOAD}

    def handler(kind: TransferType, name: str) -> CopyHandler:
        def end() -> None:
            users.remove(kind)
            if not users:
                on_shutdown()

        copier = (
            CudaCopier(device, kernel=kernels.get(kind)) if device.type == "cuda" else CpuCopier(f"tiered-kv-{name}")
        )
        ours = layout.stored() if kind == STORE else layout
        return CopyHandler(ours, kind, copier, memory, check=check, on_shutdown=end)

    return WorkerHandlers(store=handler(STORE, "store"), load=handler(LOAD, "load"))


class CopyHandler(OffloadingHandler):
    """The copies of one direction. One thread calls all methods.

    The copier executes plans one after the other. At its end the handler closes the copier: a `CudaCopier` waits for
    all plans, a `CpuCopier` for the running plan, and drops the others. Until then the handler keeps `memory`, so that
    the layout's addresses stay valid.
    """

    def __init__(
        self,
        layout: BlockLayout,
        kind: TransferType,
        copier: CudaCopier | CpuCopier,
        memory: object,
        *,
        check: Callable[[], object],
        on_shutdown: Callable[[], object],
    ) -> None:
        self._check = check
        self._on_shutdown = on_shutdown
        self._layout = layout
        self._kind = kind
        self._copier = copier
        # Called by `shutdown`, or when the handler is collected: copies must not outlive their memory.
        self._end = weakref.finalize(self, _end_copies, copier, memory)
        self._transfers: dict[int, tuple[CudaCopy | CpuCopy, int]] = {}
        """The unreported transfers and their bytes, by job id, in the order of their submission."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        if not self._end.alive:
            raise ShutdownError(f"transfer {job_id} was begun after the handler was shut down")
        if job_id in self._transfers:
            raise ValueError(f"transfer {job_id} is still to be reported; give each job a number of its own")
        self._check()
        plan = plan_transfer(self._layout, self._kind, spec)
        self._transfers[job_id] = self._copier.submit(plan), plan.total_bytes
        return True

    def get_finished(self) -> list[TransferResult]:
        results: list[TransferResult] = []
        if not self._transfers:
            return results
        for job_id, (copy, total_bytes) in list(self._transfers.items()):
            if not copy.has_ended():
                break
            del self._transfers[job_id]
            seconds = copy.seconds()
            results.append(TransferResult(job_id, seconds is not None, total_bytes, seconds, self._kind))
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            if job_id in self._transfers:
                self._transfers[job_id][0].wait()

    def shutdown(self) -> None:
        if self._end.alive:
            self._end()
            self._on_shutdown()


def _end_copies(copier: CudaCopier | CpuCopier, memory: object) -> None:
    """Close the copier while the memory is still referenced."""
    copier.close()
