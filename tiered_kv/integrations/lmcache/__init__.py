"""Tiered KV below LMCache: our tiers as an L2 adapter of its server, over the server's own L1 memory.

LMCache finds `TieredKVL2Adapter` by the name of this module; docs/how-to/lmcache.md has the configuration.

Raises:
    ConfigError: On import, if LMCache is not installed or its version is not tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.integrations import checked_version, imported_on_use

if TYPE_CHECKING:
    from tiered_kv.integrations.lmcache.adapter import TieredKVL2Adapter

__all__ = ["LMCACHE_VERSION", "TESTED_VERSIONS", "TieredKVL2Adapter"]

TESTED_VERSIONS = ("0.5.6",)
"""The versions that the tests run. Patch releases change the interface, so no other is accepted."""

LMCACHE_VERSION = checked_version("lmcache", "LMCache", TESTED_VERSIONS, parts=4)
"""The installed version."""

__getattr__ = imported_on_use(__name__, {"TieredKVL2Adapter": "adapter"})
