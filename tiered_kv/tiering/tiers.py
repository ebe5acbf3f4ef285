"""The secondary tiers of a manager together: their guards, reserved budgets, resets and gauges.

The manager makes one collection, and calls it on its thread. Any thread may read the gauges. What must stay true: the
tiers are in the order of the search, and after an exception of one tier the others are still called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tiered_kv.base import ReqContext
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.metrics.notices import Notices
from tiered_kv.tiering.account import TierAccount
from tiered_kv.tiering.answers import checked_flag, tier_exceptions
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.pace import EngineCost

_BUDGET_SHARE = 4
"""The default limit of the rows that stores to a tier take, and of the rows that loads take: the primary tier's rows,
divided by this."""


class GuardedTiers(tuple[GuardedTier, ...]):
    """Guarded tiers in the order of the search."""

    __slots__ = ()

    @classmethod
    def guarding(
        cls,
        tiers: Sequence[SecondaryTierManager],
        settings: Sequence[TierSettings] | None,
        rows: PrimaryRows,
        clock: Callable[[], float],
        *,
        cost: EngineCost,
        notices: Notices,
        history: BlockHistory | None,
        wear_clock: Callable[[], float] | None,
    ) -> GuardedTiers:
        """Guard each tier by its settings; by default by the settings of its `tier_type`."""
        settings = settings or [TierSettings(type=tier.tier_type) for tier in tiers]
        block_bytes = rows.backend.block_size
        return cls(
            GuardedTier(
                tier,
                of_tier,
                block_bytes,
                block_bytes * rows.backend.num_blocks // _BUDGET_SHARE,
                clock,
                cost=cost,
                number=number,
                notices=notices,
                history=history,
                reports_events=rows.reports_events,
                wear_clock=wear_clock,
            )
            for number, (tier, of_tier) in enumerate(zip(tiers, settings, strict=True), 1)
        )

    @property
    def accounts(self) -> list[TierAccount]:
        """The account of each tier."""
        return [guarded.account for guarded in self]

    @property
    def jobs_in_flight(self) -> int:
        """Jobs that a tier has not reported yet, including expired ones."""
        return sum(len(guarded.jobs) for guarded in self)

    @property
    def has_saved_reset(self) -> bool:
        """Whether the storage of each tier has the last reset."""
        try:
            saved = [checked_flag(guarded.tier.has_saved_reset) for guarded in self]
        except tier_exceptions():
            return False
        return all(saved) and not self.disabled()  # a tier that cannot reset has old blocks

    def disabled(self) -> set[str]:
        """Return the names of the tiers that are not used any more. Any thread may call."""
        return {guarded.name for guarded in self if guarded.is_disabled}

    def limits(self) -> dict[str, TenantLimits]:
        """Return the limits of tenants of each tier that has some, by the tier's name. Any thread may call."""
        found = {guarded.name: guarded.tier.tier_spec.limits for guarded in self}
        return {name: limits for name, limits in found.items() if limits is not None}

    def reserve_stores(self, num_blocks: int) -> bool:
        """Reserve store budget in every tier; return False if a tier has too little now."""
        if any(guarded.is_full_for(num_blocks) for guarded in self):
            return False
        self.release_stores(-num_blocks)
        return True

    def release_stores(self, num_blocks: int) -> None:
        """Release budget that `reserve_stores` has reserved."""
        for guarded in self:
            guarded.stores.reserved_blocks -= num_blocks

    def reset(self) -> None:
        """Reset every tier; a tier that cannot reset is disabled, since its blocks are not valid any more."""
        for guarded in self:
            guarded.reset_cache()

    def close(self, requests: Iterable[ReqContext]) -> None:
        """Report the end of all `requests` to every tier, and shut it down."""
        contexts = list(requests)
        for guarded in self:
            for req_context in contexts:
                guarded.call("on_request_finished", req_context)
            guarded.call("shutdown")

    def estimates(self) -> dict[str, dict[str, float]]:
        """Return the gauges of the times that decide whether blocks are loaded, by tier. Any thread may call."""
        return {guarded.name: guarded.pace.snapshot() for guarded in self}
