"""The memory tier: block records in this process's memory. It is also the example for authors of tiers.

Who calls it, and on which thread. The stack finds the tier by `tiered_kv_register_tiers` below. The scheduler's thread
calls `tier.MemoryTier`: `lookup` reads the dictionary, and `touch` reorders it, without a lock. The toolkit's worker
threads (`tiered_kv/toolkit/blocking.py`) call `store_blocks` and `load_blocks`. `MemoryTier._records_lock` guards every
other change. No thread holds it while it copies a block.

What must stay true. Records, removed records that a load still reads, and stores in flight take at most the capacity. A
load verifies its record. A store from before a reset adds no block.

One ordered dictionary from key to record has everything, the least recently used record first. A store makes room
before it copies: it evicts from the front (`_make_room`). With `limits`, blocks of tenants over their shares go first,
by an order of each tenant's own (`tiered_kv/toolkit/shares.py`). A load counts as a reader of its record. The record's
memory counts until the last reader has ended. A reset sets the dictionary aside; later stores and loads release its
records in portions (`_sweep`). Nothing outlives the process.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv_memory.metrics import METRICS, OF_TENANTS
from tiered_kv_memory.settings import MemorySettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    load = imported("tiered_kv_memory.tier:MemoryTier")
    about = "Records in this process's memory, gone with it."
    keys = imported("tiered_kv_memory.simulation:MemoryKeys")
    return [
        TierType(
            "memory", MemorySettings, load, about, is_lasting=False, metrics=(*METRICS, *OF_TENANTS), key_store=keys
        )
    ]
