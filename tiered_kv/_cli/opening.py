"""Opening the tiers of a stack one by one, without the manager in front of them."""

from __future__ import annotations

from tiered_kv.config.settings import TierSettings
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory


def open_tier(config: StackConfig, settings: TierSettings, kv_view: memoryview) -> SecondaryTierManager:
    """Open one secondary tier of a stack over `kv_view`; the caller shuts it down.

    Raises:
        TieredKVError: The tier cannot be opened.
    """
    identity = config.identity
    spec = TierSpec(settings.name, config.block.bytes, identity.digest, identity.described)
    return SecondaryTierFactory.create(spec, kv_view, settings)
