"""Tiered KV inside vLLM: our tiers below vLLM's own tiering, or our whole stack as its offloading spec.

`TieredKVTier` is a secondary tier for vLLM's `TieringOffloadingSpec`. `TieredKVOffloadingSpec` replaces that spec.
`TieredKVTieringSpec` is vLLM's tiering for servers without a GPU. `TieredKVConnector` carries them all. vLLM finds them
by the name of this module; docs/how-to/vllm.md has the configurations.

Raises:
    ConfigError: On import, where vLLM is not installed or its version is unknown.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiered_kv.integrations.versions import checked_version

if TYPE_CHECKING:
    from tiered_kv.integrations.vllm.connector import TieredKVConnector
    from tiered_kv.integrations.vllm.spec import TieredKVOffloadingSpec
    from tiered_kv.integrations.vllm.tier import TieredKVTier
    from tiered_kv.integrations.vllm.tiering_spec import TieredKVTieringSpec

__all__ = [
    "TESTED_VERSIONS",
    "VLLM_VERSION",
    "TieredKVConnector",
    "TieredKVOffloadingSpec",
    "TieredKVTier",
    "TieredKVTieringSpec",
]

TESTED_VERSIONS = ("0.32.0", "0.33.0")
"""The versions that this integration's tests run. Their patch releases are taken for the same."""

VLLM_VERSION = checked_version("vllm", "vLLM", TESTED_VERSIONS)
"""The version that is installed."""

_MODULES = {
    "TieredKVConnector": "tiered_kv.integrations.vllm.connector",
    "TieredKVOffloadingSpec": "tiered_kv.integrations.vllm.spec",
    "TieredKVTier": "tiered_kv.integrations.vllm.tier",
    "TieredKVTieringSpec": "tiered_kv.integrations.vllm.tiering_spec",
}


def __getattr__(name: str) -> Any:  # Any: one of the classes above
    # Not before they are used: a scheduler with one of our tiers needs no worker.
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
