"""The memory tier: block records in this process's memory. An example for authors of tiers."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl, imported
from tiered_kv_memory.settings import MemorySettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    load = imported("tiered_kv_memory.tier:MemoryTier")
    return [TierType("memory", MemorySettings, load, "Records in this process's memory, gone with it.")]
