"""Our transfer handlers as vLLM's worker, for KV caches on CUDA devices and in CPU memory."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from tiered_kv.errors import TieredKVError
from tiered_kv.worker.handlers import WorkerHandlers


def our_caches(kv_caches: Any) -> CanonicalKVCaches:  # Any: vLLM's CanonicalKVCaches
    """Return vLLM's caches as our type, without the mapping to a canonical layout, which is refused."""
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(each.tensor, each.page_size_bytes) for each in kv_caches.tensors],
        group_data_refs=[
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )


class HandlerWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Stores and loads for vLLM. All methods belong to the worker's thread.

    vLLM has no failed transfers: it asserts success, which `python -O` leaves out. So a failed copy raises, which ends
    the engine. Otherwise the engine would compute upon bytes that did not arrive, or a block be stored without bytes.
    """

    def __init__(self, handlers: WorkerHandlers) -> None:
        self._handlers = handlers

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._handlers.store.transfer_async(job_id, (src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        # From 0.33 on, vLLM waits for an expedited load in its step. All our loads begin at once, in their order.
        return self._handlers.load.transfer_async(job_id, (src_spec, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended."""
        results = [*self._handlers.store.get_finished(), *self._handlers.load.get_finished()]
        failed = [each for each in results if not each.success]
        if failed:
            source, destination = failed[0].transfer_type or ("?", "?")
            raise TieredKVError(
                f"{len(failed)} of {len(results)} copies between the KV cache and the primary tier failed, the first "
                f"of them job {failed[0].job_id} from {source} to {destination}; the engine must end"
            )
        return [TransferResult(each.job_id, each.success, each.transfer_size, each.transfer_time) for each in results]

    def wait(self, job_ids: set[int]) -> None:
        self._handlers.store.wait(job_ids)
        self._handlers.load.wait(job_ids)

    def shutdown(self) -> None:
        self._handlers.shutdown()
