"""The block-id specs of each medium that a worker can copy from or to. Managers make them, and workers read them."""

from __future__ import annotations

from tiered_kv.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

__all__ = ["BlockIDsLoadStoreSpec", "CPULoadStoreSpec", "GPULoadStoreSpec"]


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks in the primary tier's CPU region, by row number."""

    @staticmethod
    def medium() -> str:
        return "CPU"
