"""The host tier: the cache of a host's server, which several processes share."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.hooks import TierType, hookimpl, imported
from tiered_kv_host.settings import HostTierSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    load = imported("tiered_kv_host.tier:HostTier")
    return [TierType("host", HostTierSettings, load, "The server of this host's cache.", is_shared=True)]
