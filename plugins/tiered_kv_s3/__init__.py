"""The s3 tier: blocks as objects in a bucket of S3, or of any server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl, imported
from tiered_kv_s3.settings import S3Settings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "s3",
            S3Settings,
            imported("tiered_kv_s3.tier:S3Tier", library="boto3", extra="s3"),
            "Objects in a bucket of S3 or of a server like it.",
            imported("tiered_kv_s3.administration:S3Administration", library="boto3", extra="s3"),
            is_shared=True,
            key_store=imported("tiered_kv_s3.sweeper:S3Keys"),
        )
    ]
