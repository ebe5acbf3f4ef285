"""The nvme tier: blocks in segment files on a local disk."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl
from tiered_kv.tiering.administration import TierAdministration
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_nvme.settings import NvmeSettings


def _load() -> type[SecondaryTierManager]:
    from tiered_kv_nvme.tier import NvmeTier

    return NvmeTier


def _load_administration() -> type[TierAdministration]:
    from tiered_kv_nvme.administration import NvmeAdministration

    return NvmeAdministration


def _load_key_store() -> type[KeyStore]:
    from tiered_kv_nvme.simulation import NvmeKeys

    return NvmeKeys


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `nvme`."""
    about = "Segment files in a directory on a local disk."
    return [TierType("nvme", NvmeSettings, _load, about, _load_administration, key_store=_load_key_store)]
