"""The fs tier: one file a block, in a directory that several hosts may share."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl, imported
from tiered_kv_fs.settings import FsSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "fs",
            FsSettings,
            imported("tiered_kv_fs.tier:FsTier", library="aiofiles", extra="fs"),
            "One file a block, in a directory that hosts may share.",
            imported("tiered_kv_fs.administration:FsAdministration"),
            is_shared=True,
            key_store=imported("tiered_kv_fs.sweeper:FsKeys"),
        )
    ]
