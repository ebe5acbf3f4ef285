"""The entry of a guarded tier in the registry of its stack: its account, its gauges, and the tier's own counters.

A manager, `DirectTiers` and vLLM's tier call `report_tier` once, after they have guarded the tier. Then any thread may
take a snapshot of the registry. The gauges are read without a lock: each is right at some moment of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiered_kv.config.entries import declared_metrics
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import Family, numbers
from tiered_kv.metrics.vocabulary import SECONDARY
from tiered_kv.tiering.guarded import GuardedTier


def report_tier(guarded: GuardedTier, registry: Registry) -> None:
    """Add a tier to the registry of its stack."""

    def measure() -> Iterator[tuple[str, list[Family]]]:
        yield guarded.name, numbers(SECONDARY, _gauges(guarded))

    registry.add(guarded.account.measure)
    registry.add(measure)
    registry.add_own(guarded.name, guarded.stats, declared_metrics(guarded.settings))


def _gauges(guarded: GuardedTier) -> dict[str, float]:
    block_bytes, stores, loads = guarded.block_bytes, guarded.stores, guarded.loads
    load_blocks = loads.blocks + loads.reserved_blocks
    return {
        **guarded.admission.snapshot(),
        **guarded.pace.snapshot(),
        "pinned_bytes": (stores.blocks + load_blocks) * block_bytes,
        "store_budget_bytes": stores.blocks_max * block_bytes,
        "store_budget_used_bytes": stores.blocks * block_bytes,
        "load_budget_bytes": loads.blocks_max * block_bytes,
        "load_budget_used_bytes": load_blocks * block_bytes,
        "jobs_in_flight": len(guarded.jobs),
        "quarantined_bytes": (loads.expired_blocks + stores.expired_blocks) * block_bytes,
        "drained": int(guarded.removal is not None),
        "breaker_state": guarded.breaker.state.value,
        "breaker_opened_total": guarded.breaker.times_opened,
    }
