"""What the author of a tier needs; see docs/how-to/writing-a-tier.md.

Names are imported when they are first used: a plugin that only announces its tier loads nothing else, and only the
users of `AsyncTier` load asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered_kv.base import OffloadKey, ReqContext
    from tiered_kv.config.settings import TierSettings
    from tiered_kv.config.units import Bytes, Count, Seconds
    from tiered_kv.hooks import TierType, hookimpl, tier_plugins
    from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager, TierSpec
    from tiered_kv.tiering.factory import SecondaryTierFactory
    from tiered_kv.tiering.lookups import BatchedLookups
    from tiered_kv.tiering.wrapper import WrapperTier
    from tiered_kv.toolkit.aio import AsyncTier
    from tiered_kv.toolkit.blocking import BlockingTier
    from tiered_kv.toolkit.jobs import Outcome

__all__ = [
    "AsyncTier",
    "BatchedLookups",
    "BlockingTier",
    "Bytes",
    "Count",
    "JobMetadata",
    "JobResult",
    "OffloadKey",
    "Outcome",
    "ReqContext",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "Seconds",
    "TierSettings",
    "TierSpec",
    "TierType",
    "WrapperTier",
    "hookimpl",
    "tier_plugins",
]

_MODULES = {
    "tiered_kv.base": "OffloadKey ReqContext",
    "tiered_kv.config.settings": "TierSettings",
    "tiered_kv.config.units": "Bytes Count Seconds",
    "tiered_kv.hooks": "TierType hookimpl tier_plugins",
    "tiered_kv.tiering.base": "JobMetadata JobResult SecondaryTierManager TierSpec",
    "tiered_kv.tiering.factory": "SecondaryTierFactory",
    "tiered_kv.tiering.lookups": "BatchedLookups",
    "tiered_kv.tiering.wrapper": "WrapperTier",
    "tiered_kv.toolkit.aio": "AsyncTier",
    "tiered_kv.toolkit.blocking": "BlockingTier",
    "tiered_kv.toolkit.jobs": "Outcome",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
