"""Tiered KV below LMCache: our tiers as an L2 adapter of its server, over the server's own L1 memory.

LMCache finds `TieredKVL2Adapter` by the name of this module; docs/how-to/lmcache.md has the configuration.

Raises:
    ConfigError: On import, where LMCache is not installed or its version is unknown.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiered_kv.integrations.lmcache.version import LMCACHE_VERSION, TESTED_VERSIONS

if TYPE_CHECKING:
    from tiered_kv.integrations.lmcache.adapter import TieredKVL2Adapter

__all__ = ["LMCACHE_VERSION", "TESTED_VERSIONS", "TieredKVL2Adapter"]


def __getattr__(name: str) -> Any:  # Any: the class
    if name != "TieredKVL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("tiered_kv.integrations.lmcache.adapter").TieredKVL2Adapter
