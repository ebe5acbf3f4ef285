"""The redis tier: blocks in a Redis server, a Sentinel-watched pair, or a Redis Cluster."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.errors import MissingExtraError
from tiered_kv.hooks import TierType, hookimpl
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_redis.settings import RedisSettings


def _load() -> type[SecondaryTierManager]:
    try:
        import redis  # noqa: F401  imported by the tier's modules; its absence has a message of its own
    except ImportError as error:
        raise MissingExtraError("tier 'redis'", "redis") from error
    from tiered_kv_redis.tier import RedisTier

    return RedisTier


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `redis`."""
    return [TierType("redis", RedisSettings, _load, "A Redis server or cluster that several machines share.")]
