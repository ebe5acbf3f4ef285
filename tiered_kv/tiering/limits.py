"""The limits of the tiering manager, each with its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tiered_kv.config.settings import TierSettings


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The limits of one secondary tier.

    Args:
        store_budget_bytes: Primary memory that stores to this tier may pin at one time; None for a quarter of the
            region.
        load_budget_bytes: Primary memory that loads from this tier may occupy at one time; None for a quarter.
        job_timeout_s: A job that takes longer has expired: its keys are a miss, its blocks wait for the tier.
        lookup_timeout_s: A lookup that is not answered by then is a miss for its request.
        admit_after: A block is stored when it is offered for the n-th time.
        fill_on_promotion: Whether a block that was promoted from a tier below is offered to this one.
        breaker_failures: Failures in a row that open the breaker.
        breaker_cooldown_s: How long the breaker stays open before a probe is let through.
    """

    store_budget_bytes: int | None = None
    load_budget_bytes: int | None = None
    job_timeout_s: float = 30.0
    lookup_timeout_s: float = 1.0
    admit_after: int = 1
    fill_on_promotion: bool = False
    breaker_failures: int = 5
    breaker_cooldown_s: float = 2.0

    @classmethod
    def of(cls, settings: TierSettings) -> Self:
        """Return the limits in a tier's entry."""
        return cls(
            store_budget_bytes=settings.store_budget,
            load_budget_bytes=settings.load_budget,
            job_timeout_s=settings.job_timeout,
            lookup_timeout_s=settings.lookup_timeout,
            admit_after=settings.admit_after,
            fill_on_promotion=settings.fill_on_promotion,
            breaker_failures=settings.breaker_failures,
            breaker_cooldown_s=settings.breaker_cooldown,
        )


@dataclass(frozen=True, slots=True)
class ManagerLimits:
    """The limits of all secondary tiers together.

    Args:
        promotion_blocks_max: Primary blocks that may be promoted, or kept for a request that waits for them, at one
            time; None for half of the primary tier.
        hold_s: How long a promoted block is kept for a request that does not load it.
        wait_max_s: How long a request may be answered None, whatever it waits for, until it loads a block that it
            waited for. At the bound, blocks that are not ready are misses for it until it ends.
        requests_max: Requests whose state is kept; the oldest is forgotten first.
    """

    promotion_blocks_max: int | None = None
    hold_s: float = 10.0
    wait_max_s: float = 30.0
    requests_max: int = 100_000
