"""Tiered KV inside SGLang: our tiers as the storage of its HiCache.

SGLang takes `TieredKVHiCache` for `--hicache-storage-backend dynamic`, with this module's name as `module_path`;
docs/how-to/sglang.md has the configuration.

Who calls it, and on which thread. SGLang has one thread for lookups, one for loads, one for stores. Their calls
(`backend.TieredKVHiCache.batch_exists`, `batch_get_v1`, `batch_set_v1` and the forms with several pools) wait until no
tier uses the pages any more, since SGLang reuses them then. The scheduler's thread registers pools, clears and closes.

What must stay true. A page is a hit only if all of its parts are. Everything in the engine's configuration counts for
the namespace, unless `ignored_settings.toml` names it (`engine.namespace_of`). After a clear, threads that may hold
older pages store and load nothing (`TieredKVHiCache.clear`). A pool that a hanging transfer may use stays mapped.

What is kept where. SGLang keeps pages in its host pools. `pools.PagePool` divides a page into parts: runs of bytes of
one size. Each size of part has tiers of its own (`tiered_kv/direct/tiers.py`), which read and write the pool's memory
without a copy. A load or store goes to the tiers of all sizes at once, and waits for all (`TieredKVHiCache._run`).
`engine` reads the configuration.

Raises:
    ConfigError: On import, if SGLang is not installed or its version is not tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.engines import checked_version, imported_on_use

if TYPE_CHECKING:
    from tiered_kv_sglang.backend import TieredKVHiCache

__all__ = ["SGLANG_VERSION", "TESTED_VERSIONS", "TieredKVHiCache"]

TESTED_VERSIONS = ("0.5.23",)
"""The versions that the tests run. Patch releases change the interface, so no other is accepted."""

SGLANG_VERSION = checked_version("sglang", "SGLang", TESTED_VERSIONS, parts=4)
"""The installed version."""

__getattr__ = imported_on_use(__name__, {"TieredKVHiCache": "backend"})
