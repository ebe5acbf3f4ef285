"""The redis tier: blocks in a Redis server, a Sentinel-watched pair, or a Redis Cluster."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.errors import MissingExtraError
from tiered_kv.hooks import TierType, hookimpl
from tiered_kv.tiering.administration import TierAdministration
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_redis.settings import RedisSettings


def _require_client() -> None:
    try:
        import redis  # noqa: F401  imported by the tier's modules; its absence has a message of its own
    except ImportError as error:
        raise MissingExtraError("tier 'redis'", "redis") from error


def _load() -> type[SecondaryTierManager]:
    _require_client()
    from tiered_kv_redis.tier import RedisTier

    return RedisTier


def _load_administration() -> type[TierAdministration]:
    _require_client()
    from tiered_kv_redis.administration import RedisAdministration

    return RedisAdministration


def _load_key_store() -> type[KeyStore]:
    from tiered_kv_redis.simulation import RedisKeys

    return RedisKeys


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `redis`."""
    about = "A Redis server or cluster that several machines share."
    return [
        TierType("redis", RedisSettings, _load, about, _load_administration, is_shared=True, key_store=_load_key_store),
    ]
