"""The redis tier: blocks in a Redis server, a Sentinel-watched pair, or a Redis Cluster."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl, imported
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
            key_store=imported("tiered_kv_redis.settings:RedisKeys"),
        )
    ]
