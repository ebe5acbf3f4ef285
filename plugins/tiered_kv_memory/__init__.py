"""The memory tier: it keeps blocks as records in this process's memory. It is the reference for other tiers."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_memory.settings import MemorySettings


def _load() -> type[SecondaryTierManager]:
    from tiered_kv_memory.tier import MemoryTier

    return MemoryTier


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    """Register the tier type `memory`."""
    return [TierType("memory", MemorySettings, _load, "Records in this process's memory, gone with it.")]
