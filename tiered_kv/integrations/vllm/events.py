"""Our events and hits in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.base import OffloadingEvent as VllmEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiered_kv.base import OffloadingEvent
from tiered_kv.config.settings import TierSettings
from tiered_kv.mediums import CPULoadStoreSpec


def vllm_events(events: Iterable[OffloadingEvent], locality: Any = None) -> Iterator[VllmEvent]:
    """Yield `events` as vLLM's; `locality` is vLLM's Locality of secondary tiers, or None."""
    for event in events:
        is_primary = event.medium == CPULoadStoreSpec.medium()
        yield VllmEvent(
            keys=event.keys,
            medium=Medium.CPU if is_primary else Medium.STORAGE,
            removed=event.removed,
            locality=None if is_primary else locality,
            ownership=None if is_primary else event.medium,
        )


def hit_source(settings: TierSettings) -> CacheHitSource:
    """Return what vLLM's statistics call a hit in a tier: "disk" if it has a `path`; for others vLLM has no word."""
    return CacheHitSource.DISK if hasattr(settings, "path") else CacheHitSource.EXTERNAL_UNSPECIFIED
