"""The whole stack as an engine's offloading spec, in the form of `tiered_kv.base.OffloadingSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiered_kv.base import CanonicalKVCaches, LoadStoreSpec, OffloadingHandler, OffloadingManager, OffloadingSpec
from tiered_kv.errors import ConfigError
from tiered_kv.stack import Stack
from tiered_kv.worker.shared import SharedStack


class TieredOffloadingSpec(OffloadingSpec):
    """Builds the manager in the scheduler's process, and the handlers in each worker's, from one stack.

    Every process makes a spec from the same configuration. The method that it calls decides which side it opens.

    Args:
        vllm_config: As for `OffloadingSpec`. `kv_transfer_config.kv_connector_extra_config["stack"]` is the stack: a
            path, a mapping or a `StackConfig`. `kv_transfer_config.engine_id` names this run of the engine; without
            it, the stack's `primary.shared` does. `parallel_config.world_size` is the number of workers, and
            `parallel_config.rank` which of them this process is.
        kv_cache_config: Likewise, with `num_blocks`, and `kv_cache_tensors` that have a `size` in bytes each.

    Attributes:
        shared: The stack, for an engine that needs more than the interface offers.

    Raises:
        ConfigError: The stack cannot be used, or its blocks are smaller than the parts of all workers.
        ValueError: The block sizes do not fit each other.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:  # Any: the engine's own classes
        super().__init__(vllm_config, kv_cache_config)
        source = self.extra_config.get("stack")
        if source is None:
            raise ConfigError("expected the path of a stack's YAML file, or the same as a mapping", location="stack")
        engine_id = getattr(vllm_config.kv_transfer_config, "engine_id", None)
        gpu_block_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors) // kv_cache_config.num_blocks
        self.shared = SharedStack(
            source,
            name=f"tiered-kv-{engine_id}" if engine_id else None,
            bytes_per_worker=gpu_block_bytes * self.block_size_factor,
            num_workers=vllm_config.parallel_config.world_size,
            block_size_factor=self.block_size_factor,
        )
        self._stack: Stack | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the stack's manager. The first call opens it; its `shutdown` closes the stack.

        Raises:
            ConfigError, TierError: The stack cannot be opened.
        """
        if self._stack is None:
            self._stack = self.shared.open_stack()
        return self._stack.manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Open and return this worker's handlers.

        Raises:
            ConfigError, ValueError: As `SharedStack.open_handlers`.
        """
        return self.shared.open_handlers(kv_caches, self.vllm_config.parallel_config.rank).triples()
