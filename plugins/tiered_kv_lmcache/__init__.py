"""Tiered KV below LMCache: our tiers as an L2 adapter of its server, over the memory of the server's L1.

LMCache finds `TieredKVL2Adapter` by the name of this module; docs/how-to/lmcache.md has the configuration.

Who calls it, and on which thread. LMCache's controllers call `adapter.TieredKVL2Adapter` from two threads, and no call
waits: each returns the number of a task. The task ends on a thread of the tiers, which notifies LMCache by a
descriptor.

What must stay true. A task ends only when no tier uses its objects any more, and every task ends: an error is an answer
of misses. LMCache wants objects locked from lookup to load. Our tiers lock nothing: a block that was evicted in
between is a miss of the load. LMCache takes memory back after 300 s, so no work begins late (`tier_set.QUEUE_S_MAX`,
`JOB_TIMEOUT_S_MAX`).

What is kept where. Each model and layout of objects has a `tier_set.TierSet`: tiers over L1's memory
(`tiered_kv/direct/tiers.py`), with a namespace of their own. A store opens the set. A lookup or load opens it only if
it may have blocks. `Places` limits the open sets. `TierSet` also keeps which blocks LMCache counts as stored, and
`adapter.offload_key` makes our keys from LMCache's.

Raises:
    ConfigError: On import, if LMCache is not installed or its version is not tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.engines import checked_version, imported_on_use

if TYPE_CHECKING:
    from tiered_kv_lmcache.adapter import TieredKVL2Adapter

__all__ = ["LMCACHE_VERSION", "TESTED_VERSIONS", "TieredKVL2Adapter"]

TESTED_VERSIONS = ("0.5.6",)
"""The versions that the tests run. Patch releases change the interface, so no other is accepted."""

LMCACHE_VERSION = checked_version("lmcache", "LMCache", TESTED_VERSIONS, parts=4)
"""The installed version."""

__getattr__ = imported_on_use(__name__, {"TieredKVL2Adapter": "adapter"})
