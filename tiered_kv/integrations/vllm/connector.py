"""vLLM's offloading connector, which also hands on the engine's configuration.

vLLM's `OffloadingConnector` gives an offloading spec a summary: neither the rotary embedding nor the revision, the
attention's settings or adapters are in it, and in the scheduler's process no global has them. A connector has them all.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tiered_kv.integrations.vllm.engine import configured
from tiered_kv.integrations.vllm.metrics import forget_metrics


class TieredKVConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Chosen by `"kv_connector": "TieredKVConnector", "kv_connector_module_path": "tiered_kv.integrations.vllm"`.

    It does what vLLM's `OffloadingConnector` does, with the same settings. Its specs and tiers may ask for the engine's
    configuration while they are made.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        role: The scheduler's connector, or a worker's.
        kv_cache_config: vLLM's `KVCacheConfig`.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with configured(vllm_config, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> Any:
        """Declare the metrics of vLLM's connector and ours. vLLM takes back its own alone where it starts anew."""
        forget_metrics()
        return super().build_prom_metrics(*arguments, **named)
