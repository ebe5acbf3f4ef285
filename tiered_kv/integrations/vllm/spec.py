"""Our whole stack as vLLM's offloading spec."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec

from tiered_kv.integrations.vllm.manager import INFO_KEYS, TieredKVManager
from tiered_kv.integrations.vllm.metrics import metric_definitions
from tiered_kv.integrations.vllm.stackconfig import bytes_per_worker, stack_config
from tiered_kv.integrations.vllm.worker import HandlerWorker, our_caches
from tiered_kv.worker.shared import SharedStack

_VLLM_TELLS_OF_FLUSHES = hasattr(OffloadingManager, "on_reset_flushed")
"""From 0.33 on."""
_STEPS_AHEAD = 4
"""Steps that a scheduler may be ahead of its workers, beyond one for each pipeline stage."""


class TieredKVOffloadingSpec(OffloadingSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Chosen by `"spec_name": "TieredKVOffloadingSpec", "spec_module_path": "tiered_kv.integrations.vllm"`.

    vLLM makes one in its scheduler's process and one in each worker's; all map one region, named by the engine's id.

    Args:
        config: vLLM's `OffloadingConfig`. Its `extra_config["stack"]` is the path of a stack's file without `block`, or
            the same as a mapping.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._shared = SharedStack(
            stack_config(config),
            name=f"tiered-kv-{config.engine_id}",
            bytes_per_worker=bytes_per_worker(config),
            num_workers=config.parallel.world_size,
            block_size_factor=config.cache.blocks_per_chunk,
        )
        self._manager: TieredKVManager | None = None
        self._worker: HandlerWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        return INFO_KEYS

    def get_manager(self) -> TieredKVManager:
        """Return the scheduler's half, made on the first call.

        Raises:
            TierError: A tier cannot be opened.
        """
        if self._manager is None:
            tells_events = self.kv_events_config.enable_kv_cache_events
            self._manager = TieredKVManager(
                self._shared.open_stack(enable_events=tells_events),
                tells_events=tells_events,
                flush_steps=None if _VLLM_TELLS_OF_FLUSHES else self.config.parallel.pp_size + _STEPS_AHEAD,
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> HandlerWorker:
        """Return the half of a worker, for caches on a CUDA device or in CPU memory; made on the first call.

        Raises:
            ConfigError: The shared memory cannot be had, or CUDA cannot pin it.
        """
        if self._worker is None:
            self._worker = HandlerWorker(self._shared.open_handlers(our_caches(kv_caches), self.config.parallel.rank))
        return self._worker
