"""The s3 tier: blocks as objects in a bucket of S3, or of any server that speaks its protocol."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from tiered_kv.errors import MissingExtraError
from tiered_kv.hooks import TierType, hookimpl
from tiered_kv.tiering.administration import TierAdministration
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_s3.settings import S3Settings


def _require_client() -> None:
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtraError("tier 's3'", "s3")


def _load() -> type[SecondaryTierManager]:
    _require_client()
    from tiered_kv_s3.tier import S3Tier

    return S3Tier


def _load_administration() -> type[TierAdministration]:
    _require_client()
    from tiered_kv_s3.administration import S3Administration

    return S3Administration


def _load_key_store() -> type[KeyStore]:
    from tiered_kv_s3.simulation import S3Keys

    return S3Keys


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `s3`."""
    about = "Objects in a bucket of S3 or of a server like it."
    return [
        TierType("s3", S3Settings, _load, about, _load_administration, is_shared=True, key_store=_load_key_store),
    ]
