"""Tiered KV inside SGLang: our tiers as the storage of its HiCache.

`TieredKVHiCache` is used as `--hicache-storage-backend dynamic`, with this module's name as `module_path`;
docs/how-to/sglang.md has the configuration.

Raises:
    ConfigError: On import, if SGLang is not installed or its version is not tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.integrations import checked_version, imported_on_use

if TYPE_CHECKING:
    from tiered_kv.integrations.sglang.backend import TieredKVHiCache

__all__ = ["SGLANG_VERSION", "TESTED_VERSIONS", "TieredKVHiCache"]

TESTED_VERSIONS = ("0.5.23",)
"""The versions that the tests run. Patch releases change the interface, so no other is accepted."""

SGLANG_VERSION = checked_version("sglang", "SGLang", TESTED_VERSIONS, parts=4)
"""The installed version."""

__getattr__ = imported_on_use(__name__, {"TieredKVHiCache": "backend"})
