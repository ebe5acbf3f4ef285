"""The LMCache that is installed."""

from __future__ import annotations

from tiered_kv.integrations.versions import checked_version

TESTED_VERSIONS = ("0.5.6",)
"""The versions that this integration's tests run. Patch releases change the interface, so no other is taken."""

LMCACHE_VERSION = checked_version("lmcache", "LMCache", TESTED_VERSIONS, parts=4)
"""The version that is installed."""
