"""The nvme tier: blocks in segment files on a local disk."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl, imported
from tiered_kv_nvme.settings import NvmeSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "nvme",
            NvmeSettings,
            imported("tiered_kv_nvme.tier:NvmeTier"),
            "Segment files in a directory on a local disk.",
            imported("tiered_kv_nvme.administration:NvmeAdministration"),
            key_store=imported("tiered_kv_nvme.simulation:NvmeKeys"),
        )
    ]
