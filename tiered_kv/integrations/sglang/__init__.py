"""Tiered KV inside SGLang: our tiers as the storage of its HiCache.

`TieredKVHiCache` is used as `--hicache-storage-backend dynamic`, with this module's name as `module_path`;
docs/how-to/sglang.md has the configuration.

Raises:
    ConfigError: On import, where SGLang is not installed or its version is unknown.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiered_kv.integrations.versions import checked_version

if TYPE_CHECKING:
    from tiered_kv.integrations.sglang.backend import TieredKVHiCache

__all__ = ["SGLANG_VERSION", "TESTED_VERSIONS", "TieredKVHiCache"]

TESTED_VERSIONS = ("0.5.23",)
"""The versions that this integration's tests run. Patch releases change the interface, so no other is taken."""

SGLANG_VERSION = checked_version("sglang", "SGLang", TESTED_VERSIONS, parts=4)
"""The version that is installed."""


def __getattr__(name: str) -> Any:  # Any: the class
    if name != "TieredKVHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("tiered_kv.integrations.sglang.backend").TieredKVHiCache
