"""The host tier: the cache of this machine's server (`tiered-kv serve`), which several processes share.

Who calls it, and on which thread. The stack finds the tier by `tiered_kv_register_tiers` below. The scheduler's thread
calls `tier.HostTier`, which only queues jobs and lookups, and notes uses. The toolkit's worker threads
(`tiered_kv/toolkit/blocking.py`) do the rest. They share one connection and its manager
(`tiered_kv/server/connect.py`). `HostTier._lock` guards both, and no thread holds it while it copies blocks.

What must stay true. While the server is away, every block is a miss, and the tier attaches again by itself. The
server's rows stay mapped until a copy has ended. A store or load from before a reset is refused.

The server keeps the blocks, in rows that this process has mapped, and decides which block it evicts. A store
(`HostTier.store_blocks`) asks for rows, copies the blocks into them, and completes them. A load
(`HostTier.load_blocks`) leases the rows of blocks that the server has, copies them, and returns the lease. After a
restart of this process, lookups find every block that the server has.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv_host.metrics import METRICS
from tiered_kv_host.settings import HostTierSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    load = imported("tiered_kv_host.tier:HostTier")
    about = "The server of this host's cache."
    return [TierType("host", HostTierSettings, load, about, is_shared=True, is_host_client=True, metrics=METRICS)]
