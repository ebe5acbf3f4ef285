"""The s3 tier: blocks as objects in a bucket of S3, or of any server that speaks its protocol."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from tiered_kv.errors import MissingExtraError
from tiered_kv.hooks import TierType, hookimpl
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_s3.settings import S3Settings


def _load() -> type[SecondaryTierManager]:
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtraError("tier 's3'", "s3")
    from tiered_kv_s3.tier import S3Tier

    return S3Tier


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `s3`."""
    return [TierType("s3", S3Settings, _load, "Objects in a bucket of S3 or of a server like it.")]
