"""The base of a tier that an author writes; docs/how-to/writing-a-tier.md shows how.

A plugin's modules import it. `BlockingTier` and `AsyncTier` have two sides: the scheduler's thread queues jobs and
takes results, and workers (threads, or an event loop) call the author's methods. What must stay true: the scheduler's
side never waits, and a job is reported once. Names are imported when they are first used. So a plugin that only
announces its tier loads nothing else, and only users of `AsyncTier` load asyncio.

blocking                the base of tiers with blocking calls
aio                     the base of tiers with coroutines
queued                  the scheduler's side, which both share
jobs                    the queue of jobs and their parts
concurrency             how many parts of stores run at once
event_log               blocks that a tier has stored or removed
record                  the block record, and how it is verified
codecs                  compression and encryption of blocks
encryption              the envelope of an encrypted block
zstd                    the codec `zstd`
epoch                   separates blocks from before a reset from later ones
claimed                 a directory that belongs to one type of tier
small_files             files that are replaced in one step
shares                  the blocks of a tier by tenant, where tenants have shares
touches                 uses of blocks, noted in a storage in the background
resolver                connections to servers, with deadlines
failure_texts           the last failures, in sentences for the log
administration          survey, verify and purge of a storage without a stack
listing_administration  the same, for a storage that lists its entries
census                  counts of a storage's entries, by namespace
keys_only               tiers without bytes, for `tiered-kv simulate`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered_kv.base import OffloadKey, ReqContext
    from tiered_kv.config.hooks import TierType, hookimpl, tier_plugins
    from tiered_kv.config.settings import StorageSettings, TierSettings
    from tiered_kv.config.units import Bytes, Count, Seconds
    from tiered_kv.cpu.key_table import KeyTable
    from tiered_kv.metrics.counters import Counters
    from tiered_kv.metrics.metric import Metric
    from tiered_kv.metrics.vocabulary import common_metrics
    from tiered_kv.reasons import Reason
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
    "Counters",
    "JobMetadata",
    "JobResult",
    "KeyTable",
    "Metric",
    "OffloadKey",
    "Outcome",
    "Reason",
    "ReqContext",
    "SecondaryTierFactory",
    "SecondaryTierManager",
    "Seconds",
    "StorageSettings",
    "TierSettings",
    "TierSpec",
    "TierType",
    "WrapperTier",
    "common_metrics",
    "hookimpl",
    "tier_plugins",
]

_MODULES = {
    "tiered_kv.base": "OffloadKey ReqContext",
    "tiered_kv.config.settings": "StorageSettings TierSettings",
    "tiered_kv.config.units": "Bytes Count Seconds",
    "tiered_kv.reasons": "Reason",
    "tiered_kv.cpu.key_table": "KeyTable",
    "tiered_kv.config.hooks": "TierType hookimpl tier_plugins",
    "tiered_kv.metrics.counters": "Counters",
    "tiered_kv.metrics.metric": "Metric",
    "tiered_kv.metrics.vocabulary": "common_metrics",
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
