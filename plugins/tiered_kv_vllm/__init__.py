"""Tiered KV inside vLLM: our whole stack as its offloading spec, or our tiers below vLLM's own tiering.

vLLM finds the classes by the name of this module; docs/how-to/vllm.md has the configurations.

- `TieredKVConnector` (`connector`) is vLLM's connector, with the engine's configuration, its requests and its steps.
- `TieredKVOffloadingSpec` (`spec`) opens our stack from `"stack"`, or attaches to a server of the machine for
  `"attach"`.
- `TieredKVTier` (`tier`) is one of our tiers as a secondary tier of vLLM's `TieringOffloadingSpec`.
- `TieredKVTieringSpec` (`spec`) is vLLM's tiering for servers without a GPU.

Who calls it, and on which thread. vLLM's scheduler calls `TieredKVManager` (`manager`), which passes the calls on to
our manager, and `TieredKVTier`, all on its own thread. Each of vLLM's worker processes calls `HandlerWorker` (`spec`),
which copies between the GPU and the shared region.

What must stay true. Only `shutdown`, the opening, and `TieredKVTier.drain_jobs` wait. Everything in the engine's
configuration counts for the namespace, unless `ignored_settings.toml` names it (`engine.namespace_of`). A configuration
whose blocks could be wrong is refused at the start (`groups`, `engine.check_stages`). After a reset, a row that a
worker may still use stays out of use until the workers have flushed (`TieredKVManager.on_reset_flushed`).

The way of a request: `TieredKVConnector.on_new_request` lets the manager promote the blocks that the GPU lacks.
`get_num_new_matched_tokens` ends this prefetch and looks the blocks up. The worker copies the hits. New blocks go
through `prepare_store` and `complete_store`, in the order of their prefix, which the manager remembers. `metrics` has
our counters and events as vLLM's.

Raises:
    ConfigError: On import, if vLLM is not installed or its version is not tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.engines import checked_version, imported_on_use

if TYPE_CHECKING:
    from tiered_kv_vllm.connector import TieredKVConnector
    from tiered_kv_vllm.spec import TieredKVOffloadingSpec, TieredKVTieringSpec
    from tiered_kv_vllm.tier import TieredKVTier

__all__ = [
    "TESTED_VERSIONS",
    "VLLM_VERSION",
    "TieredKVConnector",
    "TieredKVOffloadingSpec",
    "TieredKVTier",
    "TieredKVTieringSpec",
]

TESTED_VERSIONS = ("0.32.0", "0.33.0")
"""The versions that the tests run. Their patch releases are accepted."""

VLLM_VERSION = checked_version("vllm", "vLLM", TESTED_VERSIONS)
"""The installed version."""

# A scheduler with one of our tiers needs no worker.
__getattr__ = imported_on_use(
    __name__,
    {
        "TieredKVConnector": "connector",
        "TieredKVOffloadingSpec": "spec",
        "TieredKVTier": "tier",
        "TieredKVTieringSpec": "spec",
    },
)
