"""The fs tier: one file a block, in a directory that several hosts may share."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl
from tiered_kv.tiering.administration import TierAdministration
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_fs.settings import FsSettings


def _load() -> type[SecondaryTierManager]:
    from tiered_kv_fs.tier import FsTier, carrier

    carrier()  # a missing aiofiles is reported here, before the directory is opened
    return FsTier


def _load_administration() -> type[TierAdministration]:
    from tiered_kv_fs.administration import FsAdministration

    return FsAdministration


def _load_key_store() -> type[KeyStore]:
    from tiered_kv_fs.simulation import FsKeys

    return FsKeys


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `fs`."""
    about = "One file a block, in a directory that hosts may share."
    return [
        TierType("fs", FsSettings, _load, about, _load_administration, is_shared=True, key_store=_load_key_store),
    ]
