"""The redis tier: blocks as values in a Redis server, in a pair that sentinels watch, or in a Redis Cluster.

Who calls it, and on which thread. The stack finds the tier by `tiered_kv_register_tiers` below. The scheduler's thread
calls `tier.RedisTier`, which only queues jobs and lookups, and notes uses. The toolkit's worker threads
(`tiered_kv/toolkit/blocking.py`) talk to the servers: as many as the setting `connections` says, and one more for
lookups only. Background threads ask for the servers' addresses (`topology`), probe a server that is down (`node`), and
report uses to the servers (`tiered_kv/toolkit/touches.py`).

What must stay true.

- Every exchange ends by its deadline. A connection is used again only if every reply on it has been read
  (`exchange.run`).
- Any byte of a reply may be wrong (`replies`). A load verifies the whole record, and deletes a damaged value.
- While a server is down, its keys fail at once (`node.Node`).
- Before a store, the server has the mark of this process's epoch (`epoch.KeySpace.prefix`).

What is kept where. The servers have everything, and this process keeps no index. A block's name is
`tkv1:NAMESPACE:EPOCH:KEY`, and its value is a block record. The epoch's mark is under `tkv1:NAMESPACE:epoch`, the
namespace in readable form under `tkv1:NAMESPACE:namespace`.

A store, a load (`RedisTier._transfer_blocks`) and a lookup (`contains_blocks`) go the same way.
`topology.Topology.split` says which server has which name. `blocks.Blocks` makes the commands for each server: SET with
NX, GET, STRLEN. `exchange.run` sends the commands to all servers before it awaits the first reply. Blocks use the
connection's socket directly (`connection.Link`), because redis-py copies a block several times.

How room is made. The server evicts, by its `maxmemory` and its policy, and by `ttl` if it is set. For blocks that are
used in a tier above, the tier sends a command that the server counts as a use (`Blocks.touch`).

What a restart does. The process reads the mark and joins its epoch. Lookups find all blocks of that epoch that the
server still has. A reset draws another epoch (`RedisTier.reset_cache`). The next store, or the closing, writes the
new epoch's mark. No process of the new epoch asks for the older names, and the server evicts them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv_redis.metrics import METRICS
from tiered_kv_redis.settings import RedisSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "redis",
            RedisSettings,
            imported("tiered_kv_redis.tier:RedisTier", library="redis", extra="redis"),
            "A Redis server or cluster that several machines share.",
            imported("tiered_kv_redis.administration:RedisAdministration", library="redis", extra="redis"),
            is_shared=True,
            key_store=imported("tiered_kv_redis.simulation:RedisKeys"),
            metrics=METRICS,
        )
    ]
