"""Tiered KV inside vLLM: our tiers below vLLM's own tiering, or our whole stack as its offloading spec.

`TieredKVTier` is a secondary tier for vLLM's `TieringOffloadingSpec`. `TieredKVOffloadingSpec` replaces that spec.
`TieredKVTieringSpec` is vLLM's tiering for servers without a GPU. `TieredKVConnector` carries them all. vLLM finds them
by the name of this module; docs/how-to/vllm.md has the configurations.

Raises:
    ConfigError: On import, if vLLM is not installed or its version is not tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.integrations import checked_version, imported_on_use

if TYPE_CHECKING:
    from tiered_kv.integrations.vllm.connector import TieredKVConnector
    from tiered_kv.integrations.vllm.spec import TieredKVOffloadingSpec, TieredKVTieringSpec
    from tiered_kv.integrations.vllm.tier import TieredKVTier

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
